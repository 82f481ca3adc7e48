"""Start scripts from a process that has loaded the heavy libraries already: importing them takes 10 s and more, and a test
of kills starts dozens.  What a script imports of scripts/ it imports afresh.

    with Nursery() as nursery:
        child = nursery.start(["scripts/04_train.py", "--out", out], log, RANK="0")
        child.kill(); child.wait()
"""
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Nursery:
    def __enter__(self):
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self

    def __exit__(self, *exc):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, command, log, **env):
        return Child(self, self.ask("start", [str(word) for word in command], str(log), env))


class Child:
    def __init__(self, nursery, pid):
        self.nursery, self.pid = nursery, pid

    def poll(self):
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self.nursery.ask("poll", self.pid)

    def kill(self, number=signal.SIGKILL):
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds=300):
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"process {self.pid} does not end"
            time.sleep(0.02)
        return code


def serve():
    sys.path.insert(0, str(ROOT / "scripts"))
    import datasets, hs_connectors, matplotlib.pyplot, psutil, tqdm  # noqa: E401, F401
    import speculators.models.eagle3.data, speculators.train.cli, speculators.train.optimizers  # noqa: E401, F401
    import torch.distributed.checkpoint, torch.distributed.fsdp, transformers  # noqa: E401, F401

    ended = {}
    for line in sys.stdin:
        what, *words = json.loads(line)
        if what == "start":
            answer = os.fork()
            if answer == 0:
                child(*words)
        elif words[0] not in ended:
            pid, status = os.waitpid(words[0], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                ended[pid] = answer
        else:
            answer = ended[words[0]]
        print(json.dumps(answer), flush=True)


def child(command, log, env):
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    os.environ.update(env)
    sys.argv = command
    code = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback
        traceback.print_exc(file=sys.stdout)
        code = 99
    os._exit(code)


if __name__ == "__main__":
    serve()
