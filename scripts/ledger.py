"""What was asked and what it cost: a request leaves a line before it is sent and another once it is known what came of it.

ledger.jsonl    {"ask": id, "at_most": dollars}
                {"end": id, "at_most": the same}                of a request that the server refused and does not bill
                {"end": id, "at_most", "usage", "cost"[, "answer", "by"]}       answer: a message, if it is worth one; by: whom

The second line is written before the row, so that a kill loses no answer.  A request without one is unaccounted: after a kill or
a time-out only the provider knows whether it was answered.  Money is US dollars.
"""
import math
import threading
from collections import Counter

import stage
from jsonl import Appender, read
from stage import Refused

TOKENS = ("prompt_tokens", "completion_tokens")


class Ledger:
    """Thread-safe.  finished: ids that have rows; prices: dollars a million tokens of prompts and of answers (None: usage.cost of
    the replies tells); most: dollars that may be spent, what is in flight and unaccounted included."""

    def __init__(self, out, finished, prices=None, most=None):
        self.prices, self.most = prices, most
        self.rates = [price / 1e6 for price in prices or [math.inf, math.inf]]  # a token costs no more, so far as is known
        self.spent, self.open, self.at_most = Counter(), 0, 0.0  # open: asked, and no end of it known
        self.turns = {}  # {id: lines with the answers to a prompt that has no row yet}
        self.flying, self.room, self.file = 0, threading.Condition(), Appender(out / "ledger.jsonl")
        for _, line in read(out / "ledger.jsonl"):
            self._count(line)
            if "answer" in line and not finished.get(line["end"]):
                self.turns.setdefault(line["end"], []).append(line)

    def ask(self, name, size, answer_tokens):
        """Note a request of `size` bytes (its tokens are no more) once the budget has room for it; returns its line."""
        with self.room:
            while True:
                bound = size * self.rates[0] + answer_tokens * self.rates[1]
                first = math.isinf(bound) and not self.flying and not self.spent["completion_tokens"]  # it tells the price
                if self.most is None or first or self.spent["cost"] + self.at_most + bound <= self.most:
                    break
                if not self.flying:
                    raise Refused(f"${self.spent['cost']:.4f} of --max-cost {self.most:g} are spent and the next answer may cost "
                                  f"${bound:.4f}: raise it, or give --prices where no reply tells the cost; the rest is pending")
                self.room.wait(1.0)
                stage.check_stop()
            self.flying += 1
            return self._write({"ask": name, "at_most": bound if math.isfinite(bound) else 0.0})

    def end(self, asked, usage=None, **came):
        """What came of a request, nothing if the server refused it; returns its line."""
        if usage is not None:
            cost = sum(r * (usage.get(k) or 0) for r, k in zip(self.rates, TOKENS)) if self.prices else usage.get("cost")
            came |= {"usage": usage, "cost": cost}
        with self.room:
            line = self._write({"end": asked["ask"], "at_most": asked["at_most"], **came})
            self.lose()
        return line

    def lose(self):
        """A request has ended, nobody knows how."""
        with self.room:
            self.flying -= 1
            self.room.notify_all()

    def _write(self, line):
        self.file.write(line)
        self._count(line)
        return line

    def _count(self, line):
        sign, usage, cost = 1 if "ask" in line else -1, line.get("usage", {}), line.get("cost")
        self.open, self.at_most = self.open + sign, self.at_most + sign * line["at_most"]
        self.spent.update({kind: usage[kind] for kind in TOKENS if usage.get(kind)} | ({"cost": cost} if cost else {}))
        if cost is not None and not self.prices:  # which holds the prompt's share too
            self.rates = [min(self.rates[1], cost / (usage.get("completion_tokens") or 1))] * 2
