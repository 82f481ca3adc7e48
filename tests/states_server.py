"""A real HTTP server that speaks SGLang's /generate and writes hidden states with the hook's own writer; it can misbehave.

    python tests/states_server.py MODEL STAGING [--version V]      prints its URL
    POST /fault {"fault": "nan", "times": 1}                        what the next dumped rows get, so many times

The states are transformers' in float32, so every check of a client holds.  Faults: FAULTS, and refuses, silent, cached, slow,
dies.
"""
import json
import os
import sys
import threading
import time
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "patches")]
import torch  # noqa: E402

import contract  # noqa: E402
import hidden_states_hook as hook  # noqa: E402
import states  # noqa: E402

torch.set_num_threads(1)


def nan(ids, x):
    x[len(x) // 2, 1, 3] = float("nan")
    return ids, x


def zeros(ids, x):
    x[-1, 3] = 0
    return ids, x


def neighbour(ids, x):
    """Another prompt's states, under this one's ids."""
    return ids, -x.roll(5, 0)


def bytes_of(change):
    """A fault of the file instead of the states."""
    change.bytes = True
    return change


FAULTS = {
    "nan": nan, "zeros": zeros, "neighbour": neighbour,
    "other ids": lambda ids, x: (ids.flip(0), x),
    "too few": lambda ids, x: (ids[:-1], x[:-1]),
    "cut": bytes_of(lambda data: data[:-5]), "empty": bytes_of(lambda data: b""), "header": bytes_of(lambda data: data[:20]),
    "flipped": bytes_of(lambda data: data[:-9] + bytes([data[-9] ^ 0xff, data[-8] ^ 0xff]) + data[-7:]),
}


class Server:
    def __init__(self, model, staging):
        self.writer = hook.Writer(staging, {})
        self.layers, target, head = contract.layer_ids(model), states.reference(model, torch.float32), states.Head(model)
        self.fault, self.times, self.lock = None, 0, threading.Lock()

        @lru_cache(1000)
        def answer(ids):
            """The states [T, 4, H] of a prompt and the most likely next token at each position."""
            with self.lock:
                x = target(list(ids), self.layers).bfloat16()
                return x, head.logits(x[:, 3]).argmax(-1).tolist()
        self.answer = answer

    def generate(self, body):
        ids = body["input_ids"]
        x, top = self.answer(tuple(ids))
        info = {"cached_tokens": 0, "input_top_logprobs": [None, *([[-1.0, t, None]] for t in top[:-1])],
                "output_top_logprobs": [[[-1.0, top[-1], None]]]}
        if match := hook.RID.fullmatch(body.get("rid", "")):
            with self.lock:
                fault = self.fault if self.times else None
                self.times -= bool(fault)
            if fault == "dies":
                os._exit(9)
            if fault == "slow":
                time.sleep(0.1)
            info["cached_tokens"] = 3 if fault == "cached" else 0
            if fault != "silent":
                self.write(body["rid"], match[1] == "hs8", torch.tensor(ids), x.clone(), fault)
        return {"output_ids": [top[-1]], "meta_info": info}

    def write(self, rid, fp8, ids, x, fault):
        request = self.writer.request(rid, fp8, len(ids))
        if fault == "refuses":
            return self.writer.fail(request, "the disk is on fire")
        change = FAULTS.get(fault, lambda *same: same)
        spoilt = getattr(change, "bytes", False)
        if not spoilt:
            ids, x = change(ids, x)
        if len(ids) != request.num_tokens:
            request.num_tokens = len(ids)
        if spoilt:
            request.rid = "." + rid  # until it is what the fault makes of it
        self.writer.put(request, ids, [x.flatten(1)], x.shape[1:], time.monotonic() + 60)
        if spoilt:
            request.thread.submit(int).result()
            path = self.writer.out / f".{rid}.safetensors"
            path.write_bytes(change(path.read_bytes()))
            path.rename(self.writer.out / f"{rid}.safetensors")


def main(model, staging, flag=None, version="0.0"):
    server = Server(Path(model), Path(staging))
    info = {"version": version, "dtype": "float32", "quantization": None, "kv_cache_dtype": "auto",
            "forward_hooks": hook.forward_hooks(staging, server.layers)}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as SGLang does

        def do_GET(self):
            self.reply(info)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/fault":
                server.fault, server.times = body["fault"], body["times"]
            self.reply({} if self.path == "/fault" else server.generate(body))

        def reply(self, answer):
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    print(f"http://127.0.0.1:{http.server_port}", flush=True)
    http.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
