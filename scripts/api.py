"""A client of OpenAI-compatible servers, SGLang's own endpoints included, and one way to keep many requests in flight.

The key comes from the environment (API_KEY) and goes into the Authorization header, nowhere else.
"""
import json
import os
import random
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from urllib.parse import urlsplit, urlunsplit

import requests

import stage
from stage import Refused

TRIES = 6                                   # the waits between them: 1, 2, 4, 8, 16 s, jittered, or what Retry-After says
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
GRACE = 60.0
STOP = {401: "the key is missing or wrong", 402: "the balance is used up", 403: "the key may not use this model"}


class Rejected(Refused):
    """The server will not answer this one request; 01 notes the reason in rejected.jsonl and goes on."""


class Api:
    """POST JSON to one server.  Thread-safe.  `timeout`: seconds that one request may take; `tries`: of a request."""

    def __init__(self, url, key=None, timeout=600.0, tries=TRIES):
        self.url, self.key, self.timeout, self.tries = url.rstrip("/"), key, timeout, tries
        self.local = threading.local()

    def post(self, path, body):
        """Return the reply's JSON.  Retries what may pass; Rejected for this request only; Refused for all of them."""
        for attempt in range(self.tries):
            stage.check_stop()
            wait_s = 2.0 ** attempt * random.uniform(0.5, 1.0)
            try:
                reply = self._session().post(self.url + path, json=body, timeout=self.timeout)
                code, answer = reply.status_code, _json(reply)
                error = answer.get("error") if isinstance(answer, dict) else None
                if code == 200 and isinstance(answer, dict) and not error:
                    return answer
                if code == 200:  # a router reports its provider's failure inside a success; a proxy sends a page
                    code = error.get("code") if isinstance(error, dict) else None
                    code = int(code) if str(code).isdigit() else 502
                problem = f"HTTP {code}"
                wait_s = max(wait_s, _seconds(reply.headers.get("Retry-After")))
            except requests.RequestException as failure:
                code, problem = 503, type(failure).__name__
            if code in STOP:
                raise Refused(f"{strip_credentials(self.url)} answered {code}: {STOP[code]}")
            if code not in AGAIN:
                raise Rejected(f"http {code}")
            if attempt + 1 < self.tries:
                stage.pause(wait_s)
        raise Refused(f"{strip_credentials(self.url)} failed {self.tries} times in a row for one request, last with {problem}")

    def stream(self, path, body):
        """(seconds to the first event, to the last, its JSON) of a streamed reply; Rejected if it fails: what is timed is asked once."""
        began, first, last = time.monotonic(), None, b"data: {}"
        try:
            with self._session().post(self.url + path, json=body, timeout=self.timeout, stream=True) as reply:
                for line in reply.iter_lines():
                    if line.startswith(b"data: {"):
                        first, last = first or time.monotonic() - began, line
        except requests.RequestException as failure:
            raise Rejected(type(failure).__name__) from None
        answer = json.loads(last[6:])
        if not answer or "error" in answer:
            raise Rejected(str(answer.get("error", f"http {reply.status_code}"))[:100])
        return first, time.monotonic() - began, answer

    def get(self, path):
        """The JSON of a GET."""
        return self._session().get(self.url + path, timeout=60).json()

    def has(self, path):
        """Whether a GET of `path` succeeds."""
        try:
            return self._session().get(self.url + path, timeout=30).ok
        except requests.RequestException:
            return False

    def _sign(self, request):
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request

    def _session(self):
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            self.local.session.auth = self._sign  # set also without a key: else requests looks for one in ~/.netrc
        return self.local.session


def in_flight(default=64):
    """How many requests run at once: CONCURRENCY from the environment."""
    return int(os.environ.get("CONCURRENCY", default))


def each(work, items, limit):
    """Yield work(item) for every item as it completes, at most `limit` in flight.

    On TERM or INT nothing new is started, what is in flight is still yielded for GRACE seconds (it may be paid for), then
    Stopped is raised.  An exception of `work` is raised at once; requests then in flight end with their server.
    """
    pool = ThreadPoolExecutor(limit)
    items, running, more, until = iter(items), set(), True, None
    try:
        while running or more:
            while more and len(running) < limit and not stage.stop_requested():
                try:
                    running.add(pool.submit(work, next(items)))
                except StopIteration:
                    more = False
            finished, running = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in finished:
                if not isinstance(future.exception(), stage.Stopped):  # a retry that gave up: its item stays undone
                    yield future.result()
            if stage.stop_requested():
                until = until or time.monotonic() + GRACE
                if not running or time.monotonic() > until:
                    stage.check_stop()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def strip_credentials(url):
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def _json(reply):
    try:
        return reply.json()
    except ValueError:
        return None


def _seconds(header):
    try:
        return float(header or 0)
    except ValueError:
        return 0.0
