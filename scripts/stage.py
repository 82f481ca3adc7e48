"""One stage: one directory, one command, one done.json.

A stage directory holds `args` (the command and the inputs that made it), its products and, last, `done.json`: the only
sign of completeness, for make, for a script run by hand and for ssh alike.  The same command resumes it; a changed
command is refused, or with REDO=1 in the environment starts over beside the old result, which is renamed, never deleted.

    args    line 1    <the flags as typed, without paths>     what make compares
            line 2..  every flag with its value, defaults included, and the hash of every input: what this module compares

An argument whose value is a Path says *where*; every other one says *what*, and changes the numbers.
"""
import argparse
import ctypes
import errno
import fcntl
import hashlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import psutil

import progress
import settings
from progress import log
from settings import Refused

ROOT = Path(__file__).resolve().parents[1]
CHILD = ["setpriv", "--pdeathsig", "KILL", "--"]  # prefix of a command that must not outlive this process, kill -9 included
# The log belongs to progress.py: libraries draw no bars.  Models are directories: nothing is looked up on a hub.
for _name, _value in {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1",
                      "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "LOGURU_LEVEL": "ERROR"}.items():
    os.environ.setdefault(_name, _value)
STATES = {0: "done", 1: "failed", 2: "refused"}  # how a stage ended, by its exit code; above 128 it was stopped
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Stopped(Exception):
    """TERM, INT or HUP reached a safe point."""


class RanksEnded(Exception):
    """The ranks that this process started have ended, and have said why; code: the exit code of the first that failed."""

    def __init__(self, code, cause):
        super().__init__(cause)
        self.code = code


def arguments(doc):
    """An argument parser whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                                   allow_abbrev=False)  # a shortened flag would be another command to `args`


def count(text):
    """A number of things, one at least: the type of a flag."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted 1 or more")
    return number


def run(main):
    """Call main() and end the process: 0 done, 1 failed, 2 refused, 143 / 130 / 129 stopped by TERM / INT / HUP."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's ignored HUP stays ignored
            signal.signal(number, _on_signal)
    code, cause = 0, ""
    try:
        main()
    except Refused as error:
        code, cause = 2, str(error)
        log(f"refused: {cause}", every_rank=True)
    except Stopped:
        number = _signal["number"] or signal.SIGTERM  # which another node's ranks had
        code, cause = 128 + number, f"stopped by {signal.Signals(number).name}"
        log(f"{cause}; the same command goes on from here")
    except RanksEnded as error:
        code, cause = error.code, str(error)
    except Exception as error:
        if full := _disk_full(error):
            code, cause = 2, f"{full}; make room, then the same command goes on"
            log(f"refused: {cause}", every_rank=True)
        else:
            code, cause = 1, traceback.format_exception_only(error)[-1].strip()
            for line in traceback.format_exc().splitlines():
                log(line, every_rank=True)
            rank = f"rank {progress.RANK}: " if "RANK" in os.environ else ""
            log(f"failed: {rank}{cause}", every_rank=True)
    progress.stop(STATES.get(code, "stopped" if code > 128 else "failed"), code, cause)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # at once: requests still in flight belong to a server that is gone and would be retried for a minute
        os._exit(code)


def _disk_full(error):
    """The sentence of a full disk, if that is what an exception or one that led to it says; libraries (torch.save,
    safetensors) wrap the system's error in their own."""
    while error is not None:
        if getattr(error, "errno", None) in DISK_FULL:
            return f"{error.filename or 'write'}: {error.strerror}"
        if "No space left on device" in str(error):
            return "No space left on device"
        error = error.__cause__ or error.__context__
    return None


_signal = {"number": None, "time": 0.0}


def _on_signal(number, frame):
    now = time.time()
    if _signal["number"] is None:
        _signal.update(number=number, time=now)
        if "RANK" not in os.environ:  # which had it from the process that started it
            log(f"{signal.Signals(number).name}: stopping at the next safe point")
    elif now - _signal["time"] > 10:  # a repeat within 10 s is the same wish (Ctrl-C reaches the whole group at once)
        log(f"{signal.Signals(number).name} again: stopping at once")
        os._exit(128 + number)  # whatever runs is abandoned as by kill -9, which every stage survives


def stop_requested():
    return _signal["number"] is not None


def check_stop():
    """A safe point: raise Stopped if TERM, INT or HUP has come."""
    if stop_requested():
        raise Stopped


def begin(args, several_nodes=False):
    """Claim args.out for this command and return it.  Exits 0 if it is finished, refuses if another command made it.

    Every other Path in `args` is an input and must be there: a finished stage, a model directory, or a file.  With
    several_nodes, only the first of NNODES claims it.
    """
    out, values = args.out, vars(args)
    for name, value in ((k, v) for k, vs in values.items() for v in _list(vs) if isinstance(v, (int, float))):
        if not 0 <= value < float("inf"):
            raise Refused(f"{_flag(name)} {value}: wanted a number, 0 or more")
    node, _ = nodes()
    if several_nodes and "RANK" not in os.environ and node:
        log(f"waiting for the first node to claim {out}")  # which refuses a directory that holds files of others
        while not (out / "args").exists():
            check_stop()
            time.sleep(0.2)
        _own_the_log(part_log(out, f"node-{node}"))
        return out
    if "RANK" in os.environ:  # the process that started the ranks has claimed it
        _own_the_log(part_log(out, f"rank-{progress.RANK}"))
        progress.start(out)
        return out
    wanted = [f"{_flag(k)} {_text(v)}" for k, v in values.items() if not _is_path(v)]
    wanted += [f"{k} {' '.join(identity(p) for p in _list(v))}" for k, v in values.items() if _is_path(v) and k != "out"]
    first = f"<{typed(sys.argv[1:], values)}>"
    out.mkdir(parents=True, exist_ok=True)
    _lock(out)
    record = out / "args"
    found = record.read_text().split("\n")[1:-1] if record.exists() else None
    if found is not None and found != wanted:
        if os.environ.get("REDO") != "1":
            raise Refused(_difference(out, found, wanted))
        if worker()[1] > 1:
            raise Refused(f"REDO=1 moves {out} away from under the other workers: move it by hand once they have ended")
        stamp = time.strftime("%Y%m%d-%H%M%S")
        aside = next(p for n in itertools.count() if not (p := out.with_name(f"{out.name}.{stamp}{f'-{n}' * (n > 0)}")).exists())
        out.rename(aside)
        log(f"kept the previous result in {aside}")
        out.mkdir()
        _lock(out)
    elif found is None and any(not p.name.startswith(".") and p != record for p in out.iterdir()):
        raise Refused(f"{out} holds files but no record of the command that made them; move it away or name another --out")
    write(record, "\n".join([first, *wanted]) + "\n")
    if (out / "done.json").exists():
        os.utime(out / "done.json")
        log(f"{out} is done already; delete it to start afresh")
        sys.exit(0)
    _own_the_log(part_log(out, "libraries"))
    progress.start(out)
    return out


def part_log(out, part):
    """Where the output of one part (sglang, libraries, rank-1) goes: beside the job's log, else into the stage directory."""
    job = os.environ.get("JOB_LOG")
    return Path(f"{job.removesuffix('.log')}.{out.name}.{part}.log") if job else out / f"{part}.log"


def _own_the_log(path):
    """Keep this process's output for progress.log, and send what libraries print or log, in whatever way they set logging
    up, C++ included, to a file of their own."""
    progress.output = os.dup(1)
    if not stat.S_ISREG(os.fstat(1).st_mode):
        try:  # with flags of its own: faulthandler, blocked by a reader that has stopped, would stop us all
            progress.output = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:  # a socket, or a pipe that nobody has open
            pass
    if progress.terminal:
        # Unbuffered: a buffered file that a signal interrupts refuses the line of the handler, which would end the stage.
        progress.terminal = io.TextIOWrapper(open(os.dup(2), "wb", buffering=0), write_through=True)
    sys.stdout.flush()
    with open(path, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    print(f"== {time.strftime('%F %T')} {Path(sys.argv[0]).name}, pid {os.getpid()}")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def finish(out, rows_in, rows_out, dropped, **summary):
    """Publish `out`: write done.json, last.  Every row that went in came out or was dropped for a reason."""
    dropped = {reason: n for reason, n in sorted(dropped.items()) if n}
    if rows_in != rows_out + sum(dropped.values()):
        raise AssertionError(f"{rows_in} rows in, {rows_out} out, dropped {dropped}: rows are unaccounted for")
    record = {"rows_in": rows_in, "rows_out": rows_out, "dropped": dropped, **summary,
              "seconds": round(progress.seconds(), 1), "phases": progress.phases(), "host": socket.gethostname(),
              "commit": commit(), "finished": time.strftime("%FT%T")}
    if (plan := out.with_name(f"{out.name}.plan.json")).exists():  # as the user saw it before the run: truth / plan
        record["of_plan"] = {k: round(record[k] / v, 3) for k, v in json.loads(plan.read_text()).items() if record.get(k)}
    os.sync()  # products that libraries wrote are on the disk before the file that says so
    progress.stop("done")
    write(out / "done.json", json.dumps(record, indent=1) + "\n")
    drops = f", dropped {sum(dropped.values())} ({', '.join(f'{r} {n}' for r, n in dropped.items())})" if dropped else ""
    log(f"done: {rows_in} rows in, {rows_out} out{drops}; {progress.span(record['seconds'])}")


def bind_to_parent(*_):
    """In a forked worker: leave signals to the parent, which stops at a safe point and needs the worker until then; and end
    with it, be that by kill -9: one asleep in a read would keep the lock on the stage, which a fork inherits."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pause(seconds):
    """Sleep, but not past TERM or INT."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        check_stop()
        time.sleep(0.1)


def done(directory):
    """The record of a finished stage."""
    return json.loads((Path(directory) / "done.json").read_text())


def torchrun(out):
    """Return in a rank, or if there is one only; else run NPROC ranks of this command through torchrun and raise RanksEnded.

    This process stays: it holds the lock, passes a signal on to the ranks themselves (torchrun would kill them 30 s later,
    and a checkpoint may take longer), and tells which rank failed first.  Of NNODES machines, NODE_RANK 0 runs rank 0; the
    others meet it at RDZV (host:port).
    """
    ranks, (node, machines) = settings.whole("NPROC", 1, 1), nodes()
    if "RANK" in os.environ or ranks == machines == 1:
        return
    if machines > 1 and not os.environ.get("RDZV"):
        raise Refused(f"NNODES={machines} needs RDZV=host:port of the first node")
    progress.phase(f"starting {ranks} ranks")
    if node == 0:
        for old in out.glob(".rank-*.json"):
            old.unlink()
    where = ["--standalone"] if machines == 1 else [f"--nnodes={machines}", f"--node-rank={node}", "--rdzv-backend=static",
                                                   f"--rdzv-endpoint={os.environ['RDZV']}"]
    told, report = False, part_log(out, f"torchrun-{node}" if node else "torchrun")
    with open(report, "wb") as file:
        agent = subprocess.Popen([*CHILD, sys.executable, "-m", "torch.distributed.run", *where,
                                  f"--nproc-per-node={ranks}", "--no-python", *CHILD, sys.executable, *sys.argv],
                                 stdin=subprocess.DEVNULL, stdout=progress.output, stderr=file, start_new_session=True,
                                 env={**os.environ, **progress.leader()})
    while agent.poll() is None:
        time.sleep(0.2)
        if any(out.glob(".rank-*.json")):
            progress.hand_over()
        if stop_requested() and not told:
            told = True
            for rank in psutil.Process(agent.pid).children():
                rank.send_signal(_signal["number"])
    if agent.returncode == 0:
        raise RanksEnded(0, "")
    code, state, cause = _first_failure(report, out)
    if node == 0:
        progress.amend(out, state=state, exit=code, cause=cause)
    raise RanksEnded(code, cause)


def _first_failure(log_file, out):
    """(exit code of the stage, state, cause) from torchrun's report; a rank that could not speak for itself is spoken for."""
    report = log_file.read_text(errors="replace")
    found = [tuple(map(int, pair)) for pair in re.findall(r"rank +: (\d+).*?exitcode +: (-?\d+)", report, re.DOTALL)]
    if not found:
        cause, end = "torchrun failed", log_file
    else:  # the root cause stands last; but a rank that was killed is one, if torchrun saw it at once with those that missed it
        rank, code = next((pair for pair in found if pair[1] < 0 and pair[1] != -signal.SIGTERM), found[-1])
        if code == 2 or code > 128:
            return code, STATES.get(code, "stopped"), progress.read(out).get("cause", "")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        cause, end = f"rank {rank} failed first ({how})", part_log(out, f"rank-{rank}")
    for line in progress.last_lines(end, 6):
        log(f"{end.stem}: {line}")
    log(f"failed: {cause}; {end}")
    return 1, "failed", cause


def nodes():
    """(NODE_RANK, NNODES): which of how many machines that train together this is; (0, 1) without them."""
    machines, node = settings.whole("NNODES", 1, 1), settings.whole("NODE_RANK", 0)
    if machines > 1 and node >= machines:
        raise Refused(f"NODE_RANK={node}: there are {machines} nodes, the first is 0")
    return (node, machines) if machines > 1 else (0, 1)


def worker():
    """(i, n) from WORKER=i/n: this process is the i-th of n that share a stage directory.  (1, 1) without it."""
    i, _, n = os.environ.get("WORKER", "1/1").partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise Refused(f"WORKER={os.environ['WORKER']}: wanted i/n with i from 1 to n")
    return int(i), int(n)


def write(path, data):
    """Write a file (text or bytes) so that it is either absent or complete, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{worker()[0]}.tmp")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def directory(path):
    """Fill a temporary directory that becomes `path` when the block ends: absent or complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    yield temporary
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old)
    else:
        os.replace(temporary, path)


def identity(path):
    """What a path is, whatever its name: a finished stage by its done.json, a file by its content, a model by
    `model_identity`."""
    path = Path(path)
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    if (path / "done.json").exists():
        return _sha((path / "done.json").read_bytes())
    if (path / "config.json").exists():
        return model_identity(path)
    if not path.exists():
        raise Refused(f"{path} does not exist")
    raise Refused(f"{path} is neither a finished stage (no done.json: run its stage first) nor a model (no config.json)")


def model_identity(path):
    """Hash of a model directory: its small files whole; of each weight file the size and 64 blocks spread over it,
    since hashing a terabyte takes an hour and a changed checkpoint changes everywhere."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with open(file, "rb") as f:
            if size <= 1 << 24:
                digest.update(f.read())
            else:
                for k in range(64):
                    f.seek(k * (size - 4096) // 63)
                    digest.update(f.read(4096))
    return digest.hexdigest()[:16]


def commit():
    """Which code this is: git's short hash, `-dirty` if edited, or `unknown` outside a checkout."""
    git = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def typed(argv, values):
    """The flags of `argv` as typed, without those whose value is a path."""
    kept, keep = [], True
    for word in argv:
        if word.startswith("--"):
            keep = not _is_path(values.get(word[2:].split("=")[0].replace("-", "_")))
        if keep:
            kept.append(word)
    return " ".join(kept)


def _lock(out):
    """Hold OUT/.lock as long as this process lives, so that a second one on the same directory is refused; one of
    several workers shares it and holds one of its own."""
    global _held
    i, n = worker()
    _held = [open(out / name, "w") for name in (".lock", f".lock-{i}")[:1 + (n > 1)]]
    for file, how in zip(_held, [fcntl.LOCK_EX] if n == 1 else [fcntl.LOCK_SH, fcntl.LOCK_EX]):
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another process is working in {out}") from None


def _difference(out, found, wanted):
    then, now = [[line for line in a if line not in b] for a, b in ((found, wanted), (wanted, found))]
    return (f"{out} was made by another command or from other inputs; then: {'; '.join(then) or '(nothing)'}; "
            f"now: {'; '.join(now) or '(nothing)'}.  Keep both with another NAME or DATA (by hand: another --out), "
            "or rebuild it and what follows with REDO=1")


def _flag(name):
    return "--" + name.replace("_", "-")


def _list(value):
    return value if isinstance(value, list) else [value]


def _is_path(value):
    return any(isinstance(v, Path) for v in _list(value))


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _sha(data):
    return hashlib.sha256(data).hexdigest()[:16]
