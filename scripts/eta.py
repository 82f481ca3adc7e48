"""How long phases take: the clock of one that runs, and what is expected of those to come.

A duration is remembered as [seconds, units, times] under the beginning of the phase's name, in progress.json and done.json.
"""
import json
import os
import socket
import sys
import time
from collections import deque
from pathlib import Path

NAME = Path(sys.argv[0]).stem
STAGES = sorted(p.stem for p in Path(__file__).parent.glob("[0-9][0-9]_*.py"))
GOALS = ["generate", "prepare", "extract", "train", "eval", "all"]  # of make, in the order of STAGES
RATE_WINDOW = 120.0  # seconds; long enough to smooth a burst of answers, short enough to follow a change of load


class Phase:
    """One phase or aside, and its clock, which stands still while it is set aside."""

    def __init__(self, name, total=None, unit="", done=0, asides=None, tail=None, flight=0):
        self.name, self.total, self.unit, self.first, self.done, self.said = name, total, unit, done, done, done
        self.flight = flight           # how many units run at once
        self.kind = name               # what its duration is remembered by: the beginning that the plan had for it
        self.asides, self.tail, self.metrics = dict(asides or {}), tail, {}
        self.spent, self.since = 0.0, time.time()
        self.advanced, self.longest, self.reached = self.since, 0.0, 0.0  # reached: the clock at the last advance
        self.marks = deque([(0.0, done)])  # (clock, done) within the window that the rate is measured over

    def clock(self):
        return self.spent + (time.time() - self.since if self.since else 0.0)

    def pause(self):
        self.spent, self.since = self.clock(), None

    def resume(self):
        self.since = self.advanced = time.time()

    def advance(self, n):
        now, clock = time.time(), self.clock()
        self.done += n
        self.longest, self.advanced, self.reached = max(self.longest, now - self.advanced), now, clock
        if clock - self.marks[-1][0] > 0.5:
            self.marks.append((clock, self.done))
            while len(self.marks) > 2 and self.marks[1][0] < clock - max(RATE_WINDOW, clock / 2):
                self.marks.popleft()

    def left(self):
        """Seconds to the end by what was done lately; None before the first unit, and where nothing moves."""
        (t0, n0), clock = self.marks[0], self.clock()
        if self.done == n0 or clock - t0 <= 0.5:
            return None
        begun = self.work(n0) if t0 else n0
        return (self.total - self.work(self.done)) * (clock - t0) / (self.work(self.done) - begun)

    def work(self, done):
        """Units, those in flight counted as half done: else the first answer of 64 foretells a day, and all came at once."""
        return done + min(self.flight, self.total - done) / 2

    def rate(self):
        """Units per second, lately."""
        (t0, n0), clock = self.marks[0], self.clock()
        return (self.done - n0) / (clock - t0) if clock - t0 > 0.5 else 0.0

    def usual(self):
        """Mean seconds between advances up to the last one, or None before the first.  With the silence since then counted
        in, none after a first few units would ever be too long."""
        return self.reached / (self.done - self.first) if self.done > self.first else None


def record(phase, into):
    """Add the time of a phase to `into`: {kind: [seconds, units, times]}."""
    seconds, units, times = into.get(phase.kind, (0.0, 0, 0))
    into[phase.kind] = [round(seconds + phase.clock(), 2), units + phase.done - phase.first, times + 1]


def expected(known, name, total=None):
    """Seconds that a phase takes by the first of the records `known` that has met it, or None."""
    for records in known:
        seconds, units, times = records.get(name, (0, 0, 0))
        if total is not None and units:
            return seconds * total / units
        if total is None and times:
            return seconds / times
    return None


def remaining(stack, plan, known):
    """Seconds to the end of the stage, in parts: of the running phase, its asides, and those to come; None for what is unknown.

    stack: the phase and the asides within it; plan: [(name, total or None)] to come.
    """
    first, parts = stack[0], []
    if first.total is None:
        whole = expected(known, first.kind)
        parts.append(None if whole is None else max(0.0, whole - first.clock()))
    elif first.total > first.done:
        left = first.left()
        parts.append(expected(known, first.kind, first.total - first.done) if left is None else left)
    for name, times in first.asides.items():
        mean = expected(known, name) if times else 0.0
        parts.append(None if mean is None else times * mean)
    for inner in stack[1:]:
        parts.append(max(0.0, (expected(known, inner.name) or 0.0) - inner.clock()))
    return parts + [expected(known, name, total) for name, total in plan]


def home(out):
    """RUNS/TARGET of this stage's directory: RUNS/TARGET/DATA/03_extract, RUNS/TARGET/DATA/NAME/04_train."""
    parents = Path(out).absolute().parents
    return parents[min(1 if NAME in STAGES[:3] else 2, len(parents) - 1)]


def earlier(homes, name, fits=lambda directory, done: True):
    """(directory, done.json) of the newest run on this machine of stage `name` below the folders `homes`, or (None, {})."""
    below = "*/" * (1 if name in STAGES[:3] else 2)
    for path in sorted((p for h in homes for p in h.glob(f"{below}{name}/done.json")), key=lambda p: -p.stat().st_mtime):
        try:
            found = json.loads(path.read_text())
            if found.get("host") == socket.gethostname() and fits(path.parent, found):
                return path.parent, found
        except (OSError, ValueError):
            continue
    return None, {}


def later(out):
    """A function rows -> seconds of the stages that make runs after this one (GOALS, from make), or None if unknown."""
    asked = [GOALS.index(g) for g in os.environ.get("GOALS", "").split() if g in GOALS]
    if not asked or NAME not in STAGES:
        return None
    records = [earlier([home(out)], name)[1] for name in STAGES[STAGES.index(NAME) + 1:max(asked) + 1]]
    if not records or not all(records):
        return None
    # 05 asks its own prompts, whose number the data do not change
    return lambda rows: sum(r["seconds"] * (rows / max(1, r["rows_in"]) if rows and "acceptance_length" not in r else 1)
                            for r in records)
