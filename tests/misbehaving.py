"""An OpenAI-compatible HTTP server that misbehaves by script, and the stages as processes to try against it.

Example
    def script(n, body):                      # n: this is the n-th chat request, from 1
        return {3: 402, 4: error_in_200(502)}.get(n) or answer("yes")
    with Server(script) as server:
        stage = start("01_generate.py", "--api", server.url, ...)
        assert stage.wait() == 2

What a script returns: a dict is sent as JSON with status 200; a number is a status with an error body; Reply says
status, headers, body, a delay before, or that the port closes for good instead of an answer.
"""
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
KEY = "sk-canary-5f2d9c"  # API_KEY of every process started here; Stage.wait() looks for it in all that the process left


@dataclass
class Reply:
    body: object = field(default_factory=dict)      # a dict, or bytes sent as they are
    status: int = 200
    headers: dict = field(default_factory=dict)
    delay: float = 0.0                              # seconds before the answer
    close: bool = False                             # no answer: the port closes and every connection is cut
    drip: float = 0.0                               # seconds between the bytes of the body
    part: float = 1.0                               # share of the body that is sent before the connection is cut


def answer(text="Yes, it is.", finish="stop", usage=None, reply=None, **message):
    """A whole reply; `usage` and `reply` are added to its usage and to itself, `message` to what the assistant says."""
    return {"id": "1", "model": "named-0428", "usage": {"completion_tokens": 4, **(usage or {})},
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}],
            **(reply or {})}


def error_in_200(code):
    return {"error": {"code": code, "message": "the provider failed"}}


def question(body):
    """The text that a chat request asks."""
    return body["messages"][-1]["content"]


class Server:
    """`script` answers chat requests, `completions` raw completions (404 if None), `paths` GETs (404 if not named);
    `port`: any, if 0."""

    def __init__(self, script, completions=None, paths=(), port=0):
        self.script, self.completions, self.paths = script, completions, paths
        self.requests = []                          # (time, path, body, headers) in the order they came
        self.replied = 0                            # answers sent whole
        self.lock, self.connections, self.open = threading.Lock(), set(), True
        self.now, self.most = 0, 0                  # requests being answered, and the most at one time
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.http.daemon_threads, self.http.block_on_close = True, False
        self.http.handle_error = lambda *connection: None  # clients are killed here
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """Close the port and cut what is connected."""
        with self.lock:
            if not self.open:
                return
            self.open = False
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def asked(self):
        """The questions of all chat requests so far, in order."""
        with self.lock:
            return [question(body) for _, path, body, _ in self.requests if path.endswith("/chat/completions")]

    def wait_for(self, condition, seconds=20.0):
        deadline = time.time() + seconds
        while not condition():
            assert time.time() < deadline, "the process did not come to the point that the test waits for"
            time.sleep(0.01)

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                super().setup()
                server.connections.add(self.connection)

            def finish(self):
                server.connections.discard(self.connection)
                super().finish()

            def log_message(self, *args):
                pass

            def do_GET(self):
                path = self.path.removeprefix("/v1")
                self.send(Reply({"ok": True}) if path in server.paths else Reply({"error": "no such path"}, 404))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.requests.append((time.time(), self.path, body, dict(self.headers)))
                    number = sum(path == self.path for _, path, _, _ in server.requests)
                    server.now += 1
                    server.most = max(server.most, server.now)
                script = server.script if self.path.endswith("/chat/completions") else server.completions
                reply = script(number, body) if script else 404
                if isinstance(reply, int):
                    reply = Reply({"error": {"code": reply, "message": f"this is error {reply}"}}, reply)
                if not isinstance(reply, Reply):
                    reply = Reply(reply)
                time.sleep(reply.delay)
                with server.lock:
                    server.now -= 1
                if reply.close:
                    server.close()
                if server.open:
                    self.send(reply)
                    with server.lock:
                        server.replied += 1
                else:
                    self.close_connection = True

            def send(self, reply):
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in {"Content-Type": "application/json", "Content-Length": len(data), **reply.headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for piece in (data[k:k + 1] for k in range(len(data))) if reply.drip else [data[:int(reply.part * len(data))]]:
                        self.wfile.write(piece)
                        time.sleep(reply.drip)
                    if reply.part < 1:
                        self.close_connection = True
                except OSError:  # the client was killed
                    self.close_connection = True

        return Handler


# --- stages as processes ----------------------------------------------------------------------------------------------
# Importing transformers takes seconds.  A fork server imports it once; each stage is then a process of its own, forked
# from there, which runs the script as `python scripts/...` does.  Only /proc/PID/cmdline is not the script's own.

for _name, _value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}.items():
    os.environ.setdefault(_name, _value)  # read when the libraries are imported
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["requests", "torch", "transformers", "transformers.models.auto.tokenization_auto",
                               "transformers.generation.configuration_utils", "transformers.models.llama.configuration_llama",
                               "tokenizers", "jinja2", "datasets", "matplotlib.pyplot"])


def _run(argv, environment, stdout, stderr):
    for number, path in ((1, stdout), (2, stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
    for name in ("RANK", "NPROC", "REDO", "LOG_EVERY"):  # what the caller's shell may have set
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, str(SCRIPTS))
    runpy.run_path(argv[0], run_name="__main__")


class Stage:
    """A running stage: `pid`, `out` (its directory); `log` and `errors` are what it has printed."""

    def __init__(self, script, argv, environment):
        self.out = Path(argv[argv.index("--out") + 1])
        self.out.parent.mkdir(parents=True, exist_ok=True)
        count = len(list(self.out.parent.glob("*.stdout")))
        self.stdout, self.stderr = (self.out.parent / f"{self.out.name}-{count}.{name}" for name in ("stdout", "stderr"))
        environment = {"API_KEY": KEY, "CONCURRENCY": "8", "OMP_NUM_THREADS": "1", **environment}
        self.process = _forks.Process(target=_run, args=([str(SCRIPTS / script), *argv], environment, self.stdout, self.stderr))
        self.process.start()
        self.pid = self.process.pid

    @property
    def log(self):
        return self.stdout.read_text() if self.stdout.exists() else ""

    @property
    def errors(self):
        return self.stderr.read_text() if self.stderr.exists() else ""

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join(10)

    def wait(self, seconds=45.0):
        """Its exit code; negative if a signal ended it.  Fails if the key stands in anything that it wrote."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.log}")
        holding_the_key(self.out, self.log + self.errors)
        return self.process.exitcode


def holding_the_key(directory, printed):
    """Fail if the key stands in what was printed or in a file below the directory."""
    assert KEY not in printed
    for file in directory.rglob("*") if directory.exists() else []:
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


def start(script, *argv, **environment):
    return Stage(script, [str(a) for a in argv], environment)


def run(script, *argv, **environment):
    """Start a stage and wait for it: (exit code, what it printed)."""
    stage = start(script, *argv, **environment)
    code = stage.wait()
    return code, stage.log + stage.errors


def refusal(printed):
    """The one sentence of a refusal, from what a stage printed."""
    found = re.findall(r"refused: (.*)", printed)
    assert len(found) == 1 and "Traceback" not in printed, printed
    return found[0]
