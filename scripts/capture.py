"""The client of SGLang servers that dump hidden states: asks for a row, waits for its file, checks it.

    with client.states(row, ids) as (path, data, reply):     # data: states.check's
        store.publish(path, row)

Protocol: patches/hidden_states_hook.py.
"""
import os
import threading
import time
from contextlib import contextmanager

import states
from api import Api, Rejected
from progress import log
from stage import Refused

DEADLINE = 600.0  # seconds from the reply to the file; the hook itself gives up after 100
TRIES = 3         # of a row whose server had no room for its states, or was gone before it wrote them


class Unwritten(Refused):
    """The server says why it has no states, or is gone."""


class Client:
    """urls: the servers; staging: where all of them write; store: what the files shall hold; window: bytes that may wait in
    staging at one time, held by a row from its request until its block ends."""

    def __init__(self, urls, staging, store, window=4 << 30):
        self.api = Api(",".join(urls), os.environ.get("API_KEY"), tries=3)
        self.staging, self.store, self.window = staging, store, window
        self.used, self.room = 0, threading.Condition()
        self.limits = None  # (least, largest) norm of each slot, once parity has seen a sample

    def server_info(self):
        """Version and settings of each server."""
        return [Api(url, self.api.key).get("/server_info") for url in self.api.urls]

    @contextmanager
    def states(self, row, ids, fp8=None, **more):
        """Yield (path, checked data, the server's reply) of a row; its file is removed unless the block moves it."""
        fp8 = self.store.fp8 if fp8 is None else fp8
        size, path = self.store.bytes_of(len(ids), fp8), None
        with self.room:
            self.room.wait_for(lambda: self.used + size <= self.window or not self.used)
            self.used += size
        try:
            path, reply = self._fetch(row, ids, fp8, more)
            yield path, states.check(path, ids, self.store.hidden_size, fp8, self.limits), reply
        finally:
            if path:
                path.unlink(missing_ok=True)
            with self.room:
                self.used -= size
                self.room.notify_all()

    def _fetch(self, row, ids, fp8, more):
        for left in reversed(range(TRIES)):
            try:
                return self._ask(f"hs{'8' * fp8}-{row}-{len(ids)}-{time.monotonic_ns() % 10**9}", ids, more)
            except Unwritten as error:
                if not left:
                    raise Refused(f"row {row}: {error}") from None
                log(f"row {row}: {error}; once more")
            except Rejected as rejection:
                raise Refused(f"row {row} of {len(ids)} tokens: {rejection}") from None

    def _ask(self, rid, ids, more):
        reply = self.api.post("/generate", {"input_ids": ids, "rid": rid, **more,
                                            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}})
        if cached := reply["meta_info"].get("cached_tokens"):
            raise Rejected(f"the server took {cached} tokens from its prefix cache; it needs --disable-radix-cache")
        path, failed = self.staging / f"{rid}.safetensors", self.staging / f"{rid}.err"
        started, wait, look = time.monotonic(), 0.002, 5.0
        while not path.exists():
            if failed.exists():
                sentence = failed.read_text().strip()
                failed.unlink()
                raise Unwritten(sentence)
            waited = time.monotonic() - started
            if waited > DEADLINE:
                raise Refused(f"{reply['server']} answered but wrote no states within {DEADLINE:.0f} s")
            if waited > look:
                look = waited + 5
                if not self.staging.exists() or not Api(reply["server"], self.api.key).has("/model_info"):
                    raise Unwritten(f"{reply['server']} is gone")
            time.sleep(wait)
            wait = min(2 * wait, 0.05)
        return path, reply
