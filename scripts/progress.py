"""Progress that can be tailed, polled and judged: plain lines in the log, a heartbeat in progress.json.

A stage calls `start` once, says with `plan` what is to come, names each of its phases with `phase`, counts with `advance`,
and steps aside with `aside` (a validation, a checkpoint).  A thread of its own prints a line at least every LOG_EVERY
seconds (environment, default 30), so that the log speaks while the main thread is inside a model load, a compile or a
request:

    14:02:31 04_train     step 1204/177230  0.7%  loss 2.113  acc 0.61/0.48/0.39  3.4 step/s  eta 10h12m
    14:03:01 04_train     compiling (48s)

eta is the time to the end of the stage: the rate of this phase, its asides, and the phases still to come, each as fast as
in this run, else as in the last run on this machine beside it; `eta over` leaves out what has never been seen.  With
`all`, it is the time to the end of the later stages that make was asked for.

The same thread is the watchdog.  A counting phase that does not advance for STALL_AFTER seconds (environment, default 120)
and several times its usual interval is stalled: one line says so and what it waits for (waits.py), the stacks go to the
stage's library log, and with STALL_EXIT (minutes, environment) the stage gives up.  Phases that do not count (a load, a
compile) are known to be quiet.  If the thread itself can't run, because some library holds the interpreter's lock,
faulthandler prints the stacks in its place.

progress.json (written atomically, at most every 5 s) says the same to programs: stage, state (running, stalled; at the end
done, stopped, refused, failed), phase, done, total, unit, rate (units per second), eta, eta_all (seconds), metrics, waits,
pid, born (creation time of pid, so that a recycled one is not taken for it), host, job (that launched it, or ""), beat, advanced (times of the last write
and the last advance), seconds (spent by all runs of this stage so far), phases {name: [seconds, units, times]}.
Only rank 0 of a torchrun speaks; the others leave .rank-N.json, so that it can say for whom it waits.
"""
import faulthandler
import json
import os
import re
import select
import socket
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

import eta
import settings
import waits
from eta import NAME, STAGES, Phase

RANK = int(os.environ.get("RANK", 0))
SAVE_EVERY = 5.0
UNKNOWN = {"stage": "?", "state": "?", "phase": "?", "done": 0, "total": None, "unit": "", "rate": 0.0, "eta": None,
           "eta_all": None, "metrics": {}, "waits": "", "pid": 0, "born": 0.0, "host": "?", "job": "", "beat": 0.0,
           "advanced": 0.0, "seconds": 0.0, "phases": {}}
output = 1           # file descriptor of the log, and the terminal to draw a bar on; stage.py makes them private
terminal = sys.stderr if sys.stderr.isatty() else None


def log(message, every_rank=False):
    """Print one time-stamped line; control characters, which model text may hold, are replaced."""
    if RANK == 0 or every_rank:
        text = "".join(c if c.isprintable() else " " for c in str(message))
        bar = _State.bar
        if bar:
            bar.clear()
        try:
            # A pager that is not scrolled or a terminal under Ctrl-S takes nothing: drop the line, not the training.
            if select.select([], [output], [], 1.0)[1]:
                os.write(output, f"{time.strftime('%H:%M:%S')} {NAME:<12} {text}\n".encode(errors="replace"))
        except OSError:  # a log on a full disk, or whose reader has gone, must not kill what it reports
            pass
        if bar:
            bar.refresh()


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


def size(count):
    """Bytes as people say them: 512 B, 1.4 MB, 4.6 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def last_lines(path, lines=12):
    """The last lines of a library's log that say something: no blanks, colours, bars half drawn, frames or warnings' code."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|^\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] ", "", text.replace("\r", "\n"), flags=re.MULTILINE)
    noise = ("Ignore import error", "Traceback", "  ", "stacks at", "Thread 0x", "Current thread", "== ", "\t")
    return [line[:180] for line in text.split("\n") if line.strip() and not line.startswith(noise)][-lines:]


class _State:
    path = None                # progress.json or .rank-N.json; None before start
    before = 0.0               # seconds spent by earlier runs of this stage
    stack = []                 # the phase, and asides within it
    plan, rows = [], None      # what is to come: [(beginning of its name, total or None)]
    spent, past = {}, {}       # {name: [seconds, units, times]}: by this stage, by an earlier run of another one
    later = None               # seconds that the later stages take, by their own earlier runs: a function of the rows
    stalled = None             # (since when, what it waits for)
    log_every, stall_after, stall_exit = 30.0, 120.0, float("inf")  # seconds
    bar = None                 # tqdm's, on a terminal
    started = line_at = time.time()
    born = psutil.Process().create_time()
    lock = threading.RLock()
    quit = threading.Event()
    thread = None


def start(out):
    """Begin to report for the stage directory `out`; what earlier runs of the stage spent is counted in."""
    out = Path(out)
    _State.log_every = min(1e6, max(0.1, settings.number("LOG_EVERY", 30, time="s")))  # faulthandler knows no infinity
    _State.stall_after = settings.number("STALL_AFTER", 120, time="s")
    _State.stall_exit = settings.number("STALL_EXIT", "inf", time="m")
    worker = os.environ.get("WORKER", "1/1").partition("/")[0]  # of several processes on one directory
    _State.path = out / (f".rank-{RANK}.json" if RANK else "progress.json" if worker == "1" else f"progress-{worker}.json")
    own = read(out)
    _State.before, _State.spent = own.get("seconds", 0.0), own.get("phases", {})
    _State.past = eta.earlier([eta.home(out)], NAME)[1].get("phases", {}) if NAME in STAGES else {}
    _State.later = eta.later(out)
    _State.thread = threading.Thread(target=_beat, daemon=True, name="heartbeat")
    _State.thread.start()


def plan(*phases, rows=None):
    """Say which phases are to come, in order: the beginnings of their names, or (beginning, total).  rows: of this stage."""
    _State.plan = [p if isinstance(p, tuple) else (p, None) for p in phases]
    _State.rows = rows


def phase(name, total=None, unit="", done=0, asides=None, tail=None, flight=0):
    """Enter a named phase; with `total` it counts `unit`s from `done`, without it only time passes.

    asides: {name: how many are to come}; tail: a log whose last line tells more (of a server that starts); flight: how
    many units run at once.
    """
    with _State.lock:
        _leave()
        _State.stack = [Phase(name, total, unit, done, asides, tail, flight)]
        for i, (beginning, _) in enumerate(_State.plan):
            if name.startswith(beginning):
                _State.plan, _State.stack[0].kind = _State.plan[i + 1:], beginning
                break
        _State.line_at = time.time()
        if total is None:
            left = _eta()[0]
            log(name + (f"  eta {left}" if left else ""))
        else:
            log(f"{name}: {done} of {total} {unit}s done" if done else f"{name}: {total} {unit}s")
        _new_bar()
        _save()


def advance(n=1, **metrics):
    """Count `n` more units; `metrics` (name=text) appear in the lines until they are given anew."""
    with _State.lock:
        if not _State.stack:
            return
        current = _State.stack[-1]
        current.metrics.update(metrics)
        if n:
            current.advance(n)
            if _State.stalled:
                log(f"moving again after {span(time.time() - _State.stalled[0])}")
                _State.stalled = None
            if _State.bar and len(_State.stack) == 1:
                _State.bar.update(n)


@contextmanager
def aside(name, total=None, unit=""):
    """A named pause of a counting phase, which goes on afterwards with its rate and ETA; counts like a phase."""
    with _State.lock:
        if _State.stack:
            _last_line()
            _State.stack[-1].pause()
            left = _State.stack[0].asides
            left[name] = max(0, left.get(name, 0) - 1)
        _State.stack.append(Phase(name, total, unit))
        _State.line_at = time.time()
        log(name)
    try:
        yield
    finally:
        with _State.lock:
            _last_line()
            eta.record(_State.stack.pop(), _State.spent)
            if _State.stack:
                _State.stack[-1].resume()


def phases(ended=True):
    """{name: [seconds, units, times]} of every phase so far, all runs of this stage together.  Of a phase that has not
    ended only counted units tell how long the next one takes."""
    with _State.lock:
        found = {name: list(record) for name, record in _State.spent.items()}
        for current in _State.stack:
            if ended or current.total is not None:
                eta.record(current, found)
        return found


def seconds():
    """Seconds that all runs of this stage have spent so far."""
    return _State.before + time.time() - _State.started


def stop(state="done", code=0, cause=""):
    """Print what is still unsaid and write progress.json a last time: how the stage ended."""
    if hand_over():
        with _State.lock:
            _last_line()
            _close_bar()
            _save(state=state, exit=code, cause=cause)


def hand_over():
    """Fall silent, because this stage's ranks speak from now on; returns whether it had a voice."""
    had, _State.thread = _State.thread, None
    if had is not None:
        _State.quit.set()
        had.join()
        faulthandler.cancel_dump_traceback_later()
    return had is not None


def directory():
    """The stage directory that is reported for."""
    return _State.path.parent


def leader():
    """The environment that makes ranks report this process as the one to signal."""
    return {"STAGE_PID": str(os.getpid()), "STAGE_BORN": str(_State.born)}


def read(out):
    """What progress.json of a stage directory says, or {}; what another version of it left out is UNKNOWN."""
    try:
        return UNKNOWN | json.loads((Path(out) / "progress.json").read_text())
    except (OSError, ValueError, TypeError):
        return {}


def amend(out, **fields):
    """Correct the record that another process (rank 0) left."""
    _write(Path(out) / "progress.json", read(out) | fields)


# --- lines, heartbeat, watchdog ------------------------------------------------------------------------------------------

def _patience(phase):
    """Seconds without an advance that are no stall.  The first unit may take long: workers start, a graph compiles."""
    usual = phase.usual()
    return 5 * _State.stall_after if usual is None else max(_State.stall_after, 5 * usual, 2 * phase.longest)


def _words(phase):
    if phase.total is None:
        tail = last_lines(phase.tail, 1) if phase.tail else []
        return "  ".join([f"{phase.name} ({span(phase.clock())})", *(text[:90] for text in tail)])
    parts = [f"{phase.unit} {phase.done}/{phase.total}", f"{100 * phase.done / max(1, phase.total):.1f}%"]
    parts += [f"{k.replace('_', '-')} {v}" for k, v in phase.metrics.items()]
    if rate := phase.rate():
        parts.append(f"{rate:.3g} {phase.unit}/s")
        mean = (phase.done - phase.first) / phase.clock()
        if rate < mean / 3:
            parts.append(f"slow: {mean:.3g} {phase.unit}/s before")
    return "  ".join(parts)


def _eta():
    """(text, seconds or None, seconds with the later stages or None)."""
    if not _State.stack:
        return "", None, None
    parts = eta.remaining(_State.stack, _State.plan, (_State.spent, _State.past))
    known = [p for p in parts if p is not None]
    if parts and parts[0] is None or not known:
        return "", None, None
    whole, later = sum(known), _State.later(_State.rows) if _State.later else None
    if len(known) < len(parts):
        return f"over {span(whole)}", None, None
    return span(whole) + (f"  all {span(whole + later)}" if later else ""), whole, later and whole + later


def _leave():
    """End the phase: its last line, its time."""
    _last_line()
    for ended in _State.stack:
        eta.record(ended, _State.spent)
    _State.stack, _State.stalled = [], None
    _close_bar()


def _last_line():
    current = _State.stack[-1] if _State.stack else None
    if current and current.total is not None and current.done != current.said:
        _say(current)


def _line():
    left = _eta()[0]
    stalled = f"  stalled {span(time.time() - _State.stalled[0])}: {_State.stalled[1]}" if _State.stalled else ""
    return _words(_State.stack[-1]) + (f"  eta {left}" if left and not stalled else "") + stalled


def _say(current):
    log(_line())
    current.said = current.done


def _new_bar():
    current = _State.stack[0]
    if current.total is not None and not RANK and terminal:
        from tqdm import tqdm
        _State.bar = tqdm(desc=current.name, total=current.total, initial=current.done, unit=current.unit, disable=False,
                          file=terminal)


def _close_bar():
    bar, _State.bar = _State.bar, None
    if bar:
        bar.close()


def _save(**end):
    if _State.path is None or not _State.path.parent.is_dir():
        return
    now, stack = time.time(), _State.stack or [Phase("")]
    outer, current = stack[0], stack[-1]  # what counts, and what is going on: an aside of it, perhaps
    _, left, left_all = _eta()
    quiet = now - current.advanced > SAVE_EVERY
    _write(_State.path, {
        "stage": NAME, "state": "stalled" if _State.stalled else "running", "phase": current.name,
        "done": outer.done, "total": outer.total, "unit": outer.unit, "rate": round(outer.rate(), 4),
        "eta": left and round(left), "eta_all": left_all and round(left_all),
        "metrics": outer.metrics,
        "waits": _State.stalled[1] if _State.stalled else quiet and " ".join(waits.main_thread()) or "",
        "pid": int(os.environ.get("STAGE_PID") or os.getpid()), "born": float(os.environ.get("STAGE_BORN") or _State.born),
        "host": socket.gethostname(), "job": Path(os.environ.get("JOB_LOG", "")).stem, "beat": round(now, 1), "advanced": round(current.advanced, 1),
        "seconds": round(seconds(), 1), "phases": phases(ended=False), **end})


def _write(path, record):
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(json.dumps(record) + "\n")
        temporary.replace(path)
    except OSError as error:  # a full disk must not kill the reporter: the stage's own write will tell
        log(f"progress.json not written: {error.strerror}")


def _beat():
    saved = 0.0
    while not _State.quit.wait(min(1.0, _State.log_every / 4)):
        with _State.lock:
            now = time.time()
            if _State.stack:
                _watch(_State.stack[-1], now)
                if now - _State.line_at >= _State.log_every:
                    _say(_State.stack[-1])
                    _State.line_at = now
            if not RANK:
                due = max(0.0, _State.line_at + _State.log_every - now)
                faulthandler.dump_traceback_later(due + max(1.0, _State.log_every / 2), repeat=True, file=output)
            if now - saved >= min(SAVE_EVERY, _State.stall_after / 4):
                _save()
                saved = now


def _watch(current, now):
    quiet = now - current.advanced
    if RANK or current.total is None or quiet < _patience(current):
        return
    if not _State.stalled:
        what = waits.for_whom(_State.path.parent if _State.path else None)
        _State.stalled = current.advanced, what
        usual = f" (usually {current.usual():.2g} s)" if current.usual() else ""
        log(f"stalled: no {current.unit} for {span(quiet)}{usual}; waits for {what}")
        print(f"stacks at {time.strftime('%F %T')}, stalled for {span(quiet)}:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
        _save()
    if quiet > _State.stall_exit:
        log(f"stalled for {span(quiet)}: giving up, as STALL_EXIT says; waits for {_State.stalled[1]}")
        _save(state="failed", exit=1, cause=f"stalled: {_State.stalled[1]}")
        os._exit(1)
