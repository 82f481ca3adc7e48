"""Progress that can be tailed and polled: plain lines on stdout, a heartbeat in progress.json.

A stage calls `start` once, names each of its phases with `phase`, and counts with `advance`.  A thread of its own
prints a line at least every LOG_EVERY seconds (environment, default 30), so that the log speaks while the main
thread is inside a model load, a compile or a request:

    14:02:31 04_train     step 1204/177230  0.7%  loss 2.113  acc 0.61/0.48/0.39  3.4 step/s  eta 10h12m
    14:03:01 04_train     compiling (48s)

progress.json (written atomically, at most every 5 s) says the same to programs: stage, phase, done, total, unit, rate
(units per second), eta (seconds), metrics, pid, host, advanced (time of the last advance), seconds (spent by all runs
of this stage so far).  Only rank 0 of a torchrun speaks.
"""
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path

NAME = Path(sys.argv[0]).stem
RANK = int(os.environ.get("RANK", 0))
LOG_EVERY = max(0.1, float(os.environ.get("LOG_EVERY", 30)))
SAVE_EVERY = 5.0
RATE_WINDOW = 120.0  # seconds; long enough to smooth a checkpoint, short enough to follow a change of load


def log(message, every_rank=False):
    """Print one time-stamped line; control characters, which model text may hold, are replaced."""
    if RANK == 0 or every_rank:
        text = "".join(c if c.isprintable() else " " for c in str(message))
        try:
            os.write(1, f"{time.strftime('%H:%M:%S')} {NAME:<12} {text}\n".encode(errors="replace"))  # no buffer to lose
        except OSError:  # a log on a full disk, or whose reader has gone, must not kill what it reports
            pass


def span(seconds):
    """Seconds as people say them: 48s, 3m10s, 10h12m, 4d07h."""
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


class _State:
    path = None                      # progress.json, or None before start and on ranks that stay silent
    before = 0.0                     # seconds spent by earlier runs of this stage
    phase, done, total, unit = "", 0, None, ""
    metrics = {}
    aside, aside_started = None, 0.0
    started = phase_started = advanced = line_at = time.time()
    history = deque([(started, 0)])  # (time, done) within RATE_WINDOW
    line_done = None                 # `done` of the last line printed, so that a phase ends with a line of its own
    lock = threading.RLock()
    quit = threading.Event()
    thread = None


def start(out):
    """Begin to report for the stage directory `out`; what earlier runs of the stage spent is counted in."""
    if RANK:
        return
    _State.path = Path(out) / "progress.json"
    try:
        _State.before = json.loads(_State.path.read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        _State.before = 0.0
    _State.thread = threading.Thread(target=_beat, daemon=True)
    _State.thread.start()


def seconds():
    """Seconds that all runs of this stage have spent so far."""
    return _State.before + time.time() - _State.started


def phase(name, total=None, unit="", done=0):
    """Enter a named phase; with `total` it counts `unit`s from `done`, without it only time passes."""
    with _State.lock:
        _last_line()
        now = time.time()
        _State.phase, _State.total, _State.unit, _State.done = name, total, unit, done
        _State.phase_started = _State.advanced = _State.line_at = now
        _State.line_done, _State.metrics = done, {}
        _State.history = deque([(now, done)])
        log(name if total is None else f"{name}: {done} of {total} {unit}s done" if done else f"{name}: {total} {unit}s")
        _save()


def advance(n=1, **metrics):
    """Count `n` more units; `metrics` (name=text) appear in the lines until they are given anew."""
    with _State.lock:
        now = time.time()
        _State.done += n
        _State.advanced = now
        _State.metrics.update(metrics)
        _State.history.append((now, _State.done))
        while now - _State.history[0][0] > RATE_WINDOW and len(_State.history) > 2:
            _State.history.popleft()


@contextmanager
def aside(name):
    """A named pause of a counting phase (a checkpoint, a validation), which goes on afterwards with its rate and ETA."""
    with _State.lock:
        _last_line()
        _State.aside, _State.aside_started = name, time.time()
        log(name)
    try:
        yield
    finally:
        with _State.lock:
            _State.aside, _State.advanced = None, time.time()


def stop():
    """Print what is still unsaid and write progress.json a last time."""
    if _State.thread is not None:
        _State.quit.set()
        _State.thread.join()
        with _State.lock:
            _last_line()
            _save()


def _rate():
    (t0, n0), now = _State.history[0], time.time()
    return (_State.done - n0) / (now - t0) if now - t0 > 0.5 else 0.0


def _eta():
    rate = _rate()
    return (_State.total - _State.done) / rate if _State.total is not None and rate > 0 else None


def _line():
    if _State.aside:
        return f"{_State.aside} ({span(time.time() - _State.aside_started)})"
    if _State.total is None:
        return f"{_State.phase} ({span(time.time() - _State.phase_started)})"
    parts = [f"{_State.unit} {_State.done}/{_State.total}", f"{100 * _State.done / max(1, _State.total):.1f}%"]
    parts += [f"{k.replace('_', '-')} {v}" for k, v in _State.metrics.items()]
    rate, eta = _rate(), _eta()
    if rate:
        parts.append(f"{rate:.3g} {_State.unit}/s")
    if eta is not None:
        parts.append(f"eta {span(eta)}")
    quiet = time.time() - _State.advanced
    if quiet > max(120.0, 2 * LOG_EVERY):
        parts.append(f"no advance for {span(quiet)}")
    return "  ".join(parts)


def _last_line():
    if _State.total is not None and not _State.aside and _State.done != _State.line_done:
        log(_line())
        _State.line_done = _State.done


def _save():
    if _State.path is None or not _State.path.parent.is_dir():
        return
    eta = _eta()
    record = {"stage": NAME, "phase": _State.aside or _State.phase, "done": _State.done, "total": _State.total, "unit": _State.unit,
              "rate": round(_rate(), 4), "eta": None if eta is None else round(eta), "metrics": _State.metrics,
              "pid": os.getpid(), "host": socket.gethostname(), "advanced": round(_State.advanced, 1),
              "seconds": round(seconds(), 1)}
    temporary = _State.path.with_name("progress.json.tmp")
    try:
        temporary.write_text(json.dumps(record) + "\n")
        temporary.replace(_State.path)
    except OSError as error:  # a full disk must not kill the reporter: the stage's own write will tell
        log(f"progress.json not written: {error.strerror}")


def _beat():
    saved = 0.0
    while not _State.quit.wait(min(1.0, LOG_EVERY / 4)):
        with _State.lock:
            now = time.time()
            if _State.phase and now - _State.line_at >= LOG_EVERY:
                log(_line())
                _State.line_at, _State.line_done = now, _State.done
            if now - saved >= SAVE_EVERY:
                _save()
                saved = now
