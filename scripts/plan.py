"""What is still to run, and what it takes: tokens, dollars, disk and time of each stage.

Example
    make plan TARGET=mine             # by earlier runs on this machine; what none tells is `unknown`
    make plan TARGET=mine PROBE=1     # measures first: the stages to come, on a few rows

Reads   stdin    the commands that make would run
        args and done.json of earlier runs below RUNS/TARGET and of probes (PROBES): the newest of this model, flags and ranks
Writes  nothing; a probe works in a temporary folder beside the runs and leaves its args and done.json in PROBES

A stage takes what it took then: what it counts in proportion to how much there is of it now, the rest (loading, starting a
server) as it was.  Tokens are as many a prompt as then until 02 has counted them.  Disk is that of the states.
"""
import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import contract
import eta
import progress
import settings
import stage
import states
import status
from api import in_flight
from eta import STAGES

GENERATE, PREPARE, EXTRACT, TRAIN, EVAL = STAGES
PROBES = Path(tempfile.gettempdir()) / f"eaglet-probes-{os.getuid()}"
FREE = {"model", "out", "answers", "tokens", "states", "draft", "init", "prompts", "eval-prompts", "lr", "warmup-ratio",
        "weight-decay", "seed", "prices", "max-cost"}  # flags that tell where, or change no speed
FIGURES = {"tokens": round, "cost": "${:.2f}".format, "bytes": progress.size, "seconds": progress.span}


def flags(text):
    """{flag: its values} of a command, or of `args`, where defaults stand too."""
    return {name: values.strip() for name, values in re.findall(r"--([\w-]+)((?: +(?!--)[^\s>]+)*)", text)}


def read(lines):
    """{stage: its flags} of the numbered scripts among the commands."""
    return {m[1]: flags(m[2]) for m in (re.search(r"scripts/(\d\d_\w+)\.py (.*)", line) for line in lines) if m}


def data_of(commands):
    """RUNS/TARGET/DATA."""
    name, given = next(iter(commands.items()))
    return Path(given["out"]).absolute().parents[name not in STAGES[:3]]


def standing(path):
    """The nearest folder at or above `path` that is there."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def fits(given, directory, done):
    """Whether an earlier run was of this model, by as many ranks, with flags that run as fast."""
    args, ranks = (directory / "args").read_text(), settings.whole("NPROC", 1, 1) * settings.whole("NNODES", 1, 1)
    then, now = ({k: v for k, v in f.items() if k not in FREE} for f in (flags(args.split("\n")[0]), given))
    return (then == now and done.get("ranks", ranks) == ranks and Path(given["model"], "config.json").exists()
            and f"\nmodel {stage.identity(given['model'])}\n" in args)


def scaled(amount, now, then):
    return amount * now / then if None not in (amount, now, then) and then else None


def count(prompts):
    """How many: self:N, or the rows of a file; None where that is not there yet, or on the hub."""
    if prompts.startswith("self:"):
        return int(prompts[5:])
    if prompts.startswith("hf:") or not Path(prompts).exists():
        return None
    if prompts.endswith(".parquet"):
        from pyarrow.parquet import read_metadata

        return read_metadata(prompts).num_rows
    return sum(1 for line in open(prompts, "rb") if line.strip())


def given_to(directory, done):
    """How many prompts an earlier 01 was given.  Of those that it invented, rows_in counts also what was no question: a third."""
    if not done:
        return None
    told = flags((directory / "args").read_text()).get("prompts", "")
    return count(told) if told.startswith("self:") else done["rows_in"]


def estimate(commands):
    """{stage: {FIGURES of what is left of it, None if unknown; "by": the directory that tells, or None}}."""
    data, generate, found = data_of(commands), commands.get(GENERATE, {}), {}
    homes = data.parent, PROBES / data.parent.name
    past = {s: eta.earlier(homes, s, lambda *run: fits(given, *run)) for s, given in commands.items()}
    made, prepared = (past[s][1] if s in past else status.look(data / s) for s in (GENERATE, PREPARE))
    then = given_to(past[GENERATE][0], made) if generate else made.get("rows_in")
    prompts = count(generate["prompts"]) if generate else then
    answers, cost, *usage = (scaled(made.get(k), prompts, then)
                             for k in ("rows_out", "cost", "prompt_tokens", "completion_tokens"))  # cost: as the API told
    tokens, held = scaled(prepared.get("tokens"), answers, prepared.get("rows_in")), None
    if past.get(PREPARE, (None,))[0] and answers:  # 02 draws rows by their share: 11 of a probe's 58 told nothing of 151, which held 9 out
        held = answers * float(flags((past[PREPARE][0] / "args").read_text())["val-share"])
    asked = [n if n is not None else held if Path(path).name == "heldout.jsonl" else math.inf  # a set that make gets has enough
             for path in commands.get(EVAL, {}).get("eval-prompts", "").split() for n in [count(path)]]
    if "prices" in generate and None not in usage:
        cost = sum(n * float(price) / 1e6 for n, price in zip(usage, generate["prices"].split(",")))
    figures = {GENERATE: {"cost": cost} if "api" in generate else {}, PREPARE: {"tokens": tokens},
               EXTRACT: {"bytes": bytes_of(tokens, commands.get(EXTRACT))}}
    counted = {GENERATE: prompts, PREPARE: answers, EXTRACT: tokens, TRAIN: tokens, EVAL: None if None in asked else asked}
    for s, given in commands.items():
        out, whole = Path(given["out"]), figures.get(s, {}) | {"seconds": seconds(s, *past[s], counted[s])}
        spent = {"seconds": progress.read(out).get("seconds", 0), "bytes": status.size(out)} if begun(out) else {}
        found[s] = {k: v and max(0, v - spent.get(k, 0)) for k, v in whole.items()} | {"by": past[s][0]}
    return found


def seconds(s, directory, done, now):
    """What a stage takes of which an earlier run was `done`, if `now` is how much there is of what it counts; None if unknown."""
    then = given_to(directory, done) if s == GENERATE else done.get("tokens" if s in (EXTRACT, TRAIN) else "rows_in")
    if not (now and then):
        return None
    told = flags((directory / "args").read_text())
    if s == GENERATE:  # in tokens, for which slots of the server are taken: those also that wait for the last and longest answers
        longest, flight = int(told["answer-tokens"]), in_flight()
        mean = min(longest, done.get("completion_tokens", 0) / max(1, done["rows_out"]) or longest)
        now, then = (n * mean + min(n, flight) * (longest - mean) for n in (now, then))
    if s == EVAL:
        now = sum(min(n, int(told["eval-rows"])) for n in now)
    counted = sum(spent for spent, units, _ in done["phases"].values() if units)
    return done["seconds"] - counted + counted * now / then


def bytes_of(tokens, given):
    """Of the hidden states of so many tokens."""
    if not (tokens and given):
        return None
    return states.bytes_of(tokens, contract.text_config(given["model"]).hidden_size, given.get("dtype") == "fp8")


def begun(out):
    return (out / "args").exists() and os.environ.get("REDO") != "1"


def show(found):
    """A line a stage."""
    text, clock = [], 0
    for s, f in found.items():
        words = [f"{k} {'unknown' if f[k] is None else form(f[k])}" for k, form in FIGURES.items() if k in f]
        clock = None if None in (clock, f["seconds"]) else clock + f["seconds"]
        if s == TRAIN and clock is not None:
            rest = f["seconds"] * (1 - 1 / int(flags((f["by"] / "args").read_text())["epochs"]))
            words.append(f"first held-out accuracy in {progress.span(clock - rest)}")
        text.append("  ".join([f"{s:<12}", *words, f"by {f['by']}" if f["by"] else "(nothing tells: measure with PROBE=1)"]))
    return "\n".join([*text, f"all in {'unknown' if clock is None else progress.span(clock)}"])


def keep(commands, found):
    """Leave the plan of each stage that has not begun beside it: stage.finish compares it with the truth."""
    for s, f in found.items():
        if not begun(out := Path(commands[s]["out"])):
            out.parent.mkdir(parents=True, exist_ok=True)
            stage.write(out.with_name(f"{s}.plan.json"), json.dumps({k: v for k, v in f.items() if k in FIGURES and v}) + "\n")


def probe(commands):
    """Run the stages to come, after 01, on as many prompts as there are requests in flight: fewer would be answered at another
    rate."""
    data, most = data_of(commands), in_flight()
    source = commands.get(GENERATE, {}).get("prompts", f"{data}/{GENERATE}/prompts.jsonl")
    if source.startswith("hf:"):
        raise stage.Refused(f"a probe takes some of the prompts of a file, and {source} is none: make generate first, or write one of it")
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=standing(data)) as folder:
        prompts = f"self:{min(most, count(source))}"
        if not source.startswith("self:"):  # of a file some from all over it
            prompts, lines = Path(folder, "prompts.jsonl"), [line for line in open(source, "rb") if line.strip()]
            prompts.write_bytes(b"".join(lines[::max(1, len(lines) // most)][:most]))
        goal = eta.GOALS[STAGES.index(list(commands)[-1])]
        make = subprocess.Popen(["make", "--no-print-directory", goal, f"RUNS={folder}", f"PROMPTS={prompts}"], cwd=stage.ROOT)
        try:
            while make.poll() is None:
                stage.pause(1)
        finally:  # of an interrupted one: make hands TERM on, and waits
            make.terminate()
            make.wait()
        shutil.copytree(folder, PROBES, dirs_exist_ok=True, ignore=lambda at, names: [
            name for name in names if name not in ("args", "done.json") and not Path(at, name).is_dir()])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--probe", action="store_true", help="measure first")
    args = p.parse_args()
    lines = [line for line in sys.stdin.read().splitlines() if not re.search("Nothing to be done|scripts/doctor.py", line)]
    commands = read(lines)
    print("\n".join(lines) or "nothing to do", flush=True)
    if commands and args.probe:
        if len(lines) > len(commands):
            raise stage.Refused("a probe needs what the commands before the stages make: run these first")
        probe(commands)
    if commands:
        print(show(estimate(commands)))


if __name__ == "__main__":
    stage.run(main)
