"""A client of OpenAI-compatible servers, SGLang's own endpoints included, and one way to keep many requests in flight.

The key comes from the environment (API_KEY) and goes into the Authorization header, nowhere else.  Limits that change no
answer come from the environment too: CONCURRENCY (requests in flight) and DEADLINE (seconds that one may take, default 600).
"""
import heapq
import itertools
import json
import math
import queue
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

import settings
import stage
from stage import Refused

TRIES = 6                                   # the waits between them: 1, 2, 4, 8, 16 s, jittered, or what Retry-After says
BUSY = {429, 503, 529}
AGAIN = BUSY | {408, 409, 425, 500, 502, 504}
STOP = {401: "the key is missing or wrong", 402: "the balance is used up", 403: "the key may not use this model"}
FLAGGED = re.compile("flagged|moderat|safety|content.?(policy|filter)", re.IGNORECASE)
UNSENT = re.compile("Caused by (NewConnection|NameResolution|ConnectTimeout)")
GRACE = 60.0
START, MOST = 8, 512                        # requests in flight where CONCURRENCY does not say


class Rejected(Refused):
    """The server will not answer this one request; 01 notes the reason in rejected.jsonl and goes on."""

    def __init__(self, reason, detail=""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(eq=False)
class Again(Exception):
    """This attempt failed, another may not."""
    reason: str
    began: float            # when it was sent
    after: float = 0.0      # seconds that the server asked to wait
    busy: bool = False      # fewer requests at once may help
    away: bool = False      # the server, and not this request, is at fault: no row is given up for it
    lost: bool = False      # nobody knows whether the server did the work, and bills it


class Pace:
    """How many requests run at once, and how soon the next may start.

    given: that many.  Else the level is found: it grows by one with each answer while tokens come at least a quarter as fast
    as they ever did.  429, 503 and time-outs halve it, once for all that was in flight; then it grows by one a round.
    rpm, tpm: requests and tokens a minute; tokens: how many a request is thought to take until answers tell.
    """

    def __init__(self, given=None, tokens=0, rpm=math.inf, tpm=math.inf):
        self.level, self.most = (given, given) if given else (START, MOST)
        self.tokens, self.rpm, self.tpm, self.free, self.lock = tokens, rpm, tpm, 0.0, threading.Lock()
        self.quickest, self.halved, self.retried = math.inf, 0.0, Counter()  # seconds a token of a request; when; by reason

    def wait(self):
        """Until one more request may start."""
        with self.lock:
            start = max(self.free, time.monotonic())
            self.free = start + max(60 / self.rpm, self.tokens * 60 / self.tpm)
        stage.pause(start - time.monotonic())
        stage.check_stop()

    def answered(self, began, usage):
        said = usage.get("completion_tokens") or 1
        seconds = (time.monotonic() - began) / said
        with self.lock:
            self.tokens += (said + (usage.get("prompt_tokens") or 0) - self.tokens) / 10
            self.quickest = min(self.quickest, seconds)
            if began > self.halved and seconds < 4 * self.quickest:
                self.level = min(self.most, self.level + (1 / self.level if self.halved else 1))

    def failed(self, again):
        with self.lock:
            self.retried[again.reason] += 1
            if again.busy and again.began > self.halved:
                self.level, self.halved = max(1, self.level // 2), time.monotonic()


class Api:
    """A server, or several (commas between) that share the work.  Thread-safe.  tries: of `post`."""

    def __init__(self, url, key=None, tries=TRIES, pace=None):
        self.urls = [u.rstrip("/") for u in url.split(",")]
        self.url, self.key, self.tries, self.pace = self.urls[0], key, tries, pace or Pace(1)
        self.deadline = min(1e6, settings.number("DEADLINE", 600, 0.1, time="s"))  # sockets know no infinity
        self.running, self.shunned, self.lock = Counter(), Counter(), threading.Lock()
        self.session = requests.Session()
        self.session.auth = lambda request: request  # else requests looks for one in ~/.netrc
        self.session.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=2 * MOST))

    def post(self, path, body):
        """The reply's JSON, in several attempts; Rejected for this request only; Refused for all of them."""
        return next(each(lambda _: self.once(path, body), [None], 1, tries=self.tries))

    def once(self, path, body):
        """One attempt: the reply's JSON and the `server` that gave it; Again where another may help.  For `each`, after pace.wait()."""
        began = time.monotonic()
        with self.lock:
            url = min(self.urls, key=lambda u: (self.shunned[u] > began, self.running[u]))
            self.running[url] += 1
        try:
            code, after, reply = self._exchange(url + path, body, began + self.deadline)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as failure:
            slow = isinstance(failure, (requests.ReadTimeout, urllib3.exceptions.ReadTimeoutError))
            self.shunned[url] = 0 if slow else began + 10
            raise Again("timed out" if slow else type(failure).__name__, began, busy=slow, away=not slow,
                        lost=not UNSENT.search(str(failure))) from None
        finally:
            with self.lock:
                self.running[url] -= 1
        error = _error(reply)
        if code == 200 and not error:
            self.pace.answered(began, reply["usage"])
            return reply | {"server": url}
        if code == 200:
            code = int(inner) if str(inner := error.get("code")).isdigit() else 502
        detail = str(error.get("message", "")).replace(self.key or "\0", "***")[:200]
        if code == 403 and FLAGGED.search(json.dumps(error)):  # this prompt; any other 403 is about the key
            raise Rejected("flagged", detail)
        if code in STOP:
            raise Refused(f"{strip_credentials(url)} answered {code}: {STOP[code]}")
        if code not in AGAIN:
            raise Rejected(f"http {code}", detail)
        raise Again(f"http {code}", began, after, busy=code in BUSY, away=code in BUSY)

    def stream(self, path, body):
        """(seconds to the first event, to the last, its JSON) of a streamed reply; Rejected if it fails: what is timed is asked once."""
        began, first, last = time.monotonic(), None, b"data: {}"
        try:
            with self.session.post(self.url + path, json=body, timeout=self.deadline, stream=True) as reply:
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
        return self.session.get(self.url + path, timeout=60).json()

    def has(self, path):
        """Whether a GET of `path` gives a JSON object: a site may answer any path with a page."""
        try:
            reply = self.session.get(self.url + path, timeout=30)
            return reply.ok and isinstance(reply.json(), dict)
        except (requests.RequestException, ValueError):
            return False

    def _exchange(self, url, body, until):
        """(status, seconds of Retry-After, JSON or None).  A time-out of requests is one read's: a byte a minute outlives it."""
        seconds = max(0.1, until - time.monotonic())
        timeouts = min(30.0, seconds), seconds
        with self.session.post(url, json=body, timeout=timeouts, stream=True, allow_redirects=False) as reply:
            data = bytearray()
            while chunk := reply.raw.read1(1 << 16, decode_content=True):
                data += chunk
                if time.monotonic() > until:
                    raise requests.ReadTimeout
            try:
                answer = json.loads(data)
            except ValueError:
                answer = None
            return reply.status_code, _retry_after(reply), answer


def in_flight(default=64):
    """How many requests run at once: CONCURRENCY from the environment."""
    return settings.whole("CONCURRENCY", default, 1)


def each(work, items, limit, give_up=None, tries=TRIES):
    """Yield work(item) for every item as it completes; limit: how many at once, a number or a Pace.

    The one place where requests are tried again: an item whose work raises Again waits without a slot, longer each time.
    After so many tries Refused is raised; but while a server that is away for one item answers others, its count begins
    anew, and a request that is itself at fault goes to give_up(item, again), whose result is yielded.

    On TERM, INT, or a Refused nothing new is started; what is in flight is still yielded for GRACE seconds (it may be paid
    for), then Stopped or the Refused is raised.  Any other exception of `work` is raised at once.
    """
    pace, order = limit if isinstance(limit, Pace) else Pace(limit), itertools.count()
    fresh = ((0.0, next(order), item, 0, 0) for item in items)  # due, order, item, failures, answers to others when it failed
    pool, ended, waiting = ThreadPoolExecutor(pace.most), queue.SimpleQueue(), []
    running, answered, more, end, until = 0, 0, True, None, None
    try:
        while running or waiting or more or end:
            now = time.monotonic()
            if end := end or (stage.Stopped() if stage.stop_requested() else None):
                until = until or now + GRACE
                if not running or now > until:
                    raise end
            elif running + 1 <= pace.level:
                task = heapq.heappop(waiting) if waiting and waiting[0][0] <= now else next(fresh, None)
                if task:
                    pool.submit(work, task[2]).add_done_callback(lambda future, task=task: ended.put((future, task)))
                    running += 1
                    continue
                more = False
            try:
                future, (_, number, item, failures, seen) = ended.get(timeout=0.1)
            except queue.Empty:
                continue
            running -= 1
            try:
                result = future.result()
            except Again as again:
                pace.failed(again)
                failures = 1 if again.away and answered > seen else failures + (2 if again.reason == "timed out" else 1)
                if failures < tries:
                    wait = max(again.after, 2.0 ** (failures - 1)) * random.uniform(1, 1.5)
                    heapq.heappush(waiting, (time.monotonic() + wait, number, item, failures, answered))
                    continue
                if not give_up or again.away:
                    end = end or Refused(f"one request failed {tries} times in a row, last with {again.reason}; "
                                         "it is asked again when the server is well")
                    continue
                result = give_up(item, again)
            except (Refused, stage.Stopped) as error:
                end = end or error
                continue
            answered += 1
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def strip_credentials(url):
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


def _error(reply):
    """The error in a reply as an object, empty if there is none.  A router reports its provider's failure inside a success or
    its choice; a proxy sends a page."""
    if not isinstance(reply, dict):
        return {"message": "no JSON object"}
    reply["usage"] = usage if isinstance(usage := reply.get("usage"), dict) else {}
    try:
        error = reply.get("error") or reply["choices"][0].get("error") or {}
    except (LookupError, TypeError, AttributeError):  # not every endpoint has choices
        error = {}
    return error if isinstance(error, dict) else {"message": error}


def _retry_after(reply):
    try:
        return urllib3.Retry().get_retry_after(reply.raw) or 0.0  # seconds or a date
    except urllib3.exceptions.InvalidHeader:
        return 0.0
