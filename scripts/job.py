"""Jobs that outlive the terminal: launch a make goal detached, judge it, follow its log, stop it whole.

Example
    python scripts/job.py launch mine-base-base --dirs runs/mine/base runs/mine/base/base -- make train TARGET=mine
    python scripts/job.py tail mine-base-base
    python scripts/job.py stop mine-base-base --dirs runs/mine/base runs/mine/base/base

Reads   --dirs             folders of stage directories, whose progress.json says how the job is
Writes  logs/JOB.log       the stages' lines, between a first line (time, commit, host, command) and a last one (exit N)
        logs/JOB.STAGE.PART.log    what servers, ranks and libraries print
        logs/JOB.lock      held as long as anything of the job lives; holds who runs it

launch waits WAIT seconds (environment, default 30), or until the first step with WAIT=first-step, and says how the job is.
Its exit code: 0 it runs or is done; else that of the stage (2 refused, 143 stopped), or of make.  tail ends when the job
ends, with the same code.  stop signals the stage alone, which saves and ends what it started; what is left of the job
after STOP_WAIT seconds (default 900: more than a checkpoint of any draft) is killed.
"""
import argparse
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

import progress
import settings
import stage
from progress import span

LOGS = stage.ROOT / "logs"


def alive(pid, born):
    """Whether process `pid` is there and still the one created at `born`, and no zombie."""
    try:
        process = psutil.Process(pid)
        return pid is not None and abs(process.create_time() - born) < 1.0 and lives(process)
    except (psutil.NoSuchProcess, TypeError, ValueError):  # or a record that is not ours
        return False


def lives(process):
    """Whether a psutil.Process still is that process, and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def taken(file):
    """Lock an open file, if nobody holds it; `held` in another process may for a moment."""
    for _ in range(5):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.1)
    return False


def held(lock):
    """Whether some process holds a lock file: a job runs.  Two that ask at once do not take each other for the job."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def holder(lock):
    """What a lock file says of the job that holds it, or {}."""
    try:
        return {} | json.loads(lock.read_text())
    except (OSError, ValueError, TypeError):
        return {}


def running():
    """The launched jobs that run: what their lock files say."""
    return [says for lock in sorted(LOGS.glob("*.lock")) if held(lock) and (says := holder(lock))]


def family(log):
    """Every process of the job with this log: those that carry its mark, JOB_LOG, in their environment, and their
    descendants (a server renames itself over its environment).  Nothing else is ever signalled."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("JOB_LOG") == str(log):
                found |= {m.pid: m for m in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return found


def records(dirs):
    """progress.json of every stage directory in `dirs`."""
    return [r for r in (progress.read(d / name) for d in dirs for name in progress.STAGES) if r]


def current(dirs, job, since=0.0):
    """The record of the stage of `job` that gave a sign of life last, or {}."""
    return max((r for r in records(dirs) if r["job"] == job and r["beat"] >= since), key=lambda r: r["beat"], default={})


def launch(args):
    first_step = os.environ.get("WAIT") == "first-step"
    deadline = time.time() + (float("inf") if first_step else settings.number("WAIT", 30, time="s"))
    log, lock = LOGS / f"{args.job}.log", LOGS / f"{args.job}.lock"
    LOGS.mkdir(exist_ok=True)
    file = open(lock, "a+")
    if not taken(file):
        first = holder(lock)
        first = first and " (pid {pid} on {host} since {since}: {command})".format(**first) or ""
        raise stage.Refused(f"{args.job} runs already{first}: make tail, make stop")
    file.truncate(0)
    began, start = time.time(), log.stat().st_size if log.exists() else 0
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GOALS")}
    with open(log, "ab") as out:
        runner = subprocess.Popen([sys.executable, __file__, "run", args.job, "--dirs", *args.dirs, "--", *args.command],
                                  stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                                  pass_fds=[file.fileno()], env={**env, "JOB_LOG": str(log), "JOB_LOCK": str(file.fileno())})
    file.close()  # held by the job from here on
    print(f"{args.job} launched (pid {runner.pid}): {log}", flush=True)
    while runner.poll() is None and time.time() < deadline:
        time.sleep(0.2)
        record = current(args.dirs, args.job, began)
        # Neither the steps of an earlier run, which have no rate, nor files that are checked
        if first_step and record.get("rate") and not record["phase"].startswith("checking"):
            break
    code = runner.poll()
    record = current(args.dirs, args.job, began)
    if code is None:
        print(f"{record['stage']}: {how(record)}" if record else f"no stage has begun yet ({span(time.time() - began)})")
        return 0
    if code == 0:
        print("done")
        return 0
    with open(log, "rb") as text:
        text.seek(start)
        print(*text.read().decode(errors="replace").splitlines()[-12:], sep="\n")
    ended = record if record.get("exit") else {}  # else it left no word, or the one before it had ended well
    print(f"{ended.get('state', 'died')}: {ended.get('cause') or 'see above'} (exit {code})")
    return code


def how(record):
    """*training, step 3 of 177230*, or *loading libraries (3s)*."""
    if record["total"]:
        words = f"{record['phase']}, {record['unit']} {record['done']} of {record['total']}"
    else:
        words = f"{record['phase']} ({span(time.time() - record['advanced'])})"
    if record["state"] == "stalled":
        return f"stalled: {words}; waits for {record['waits']}"
    return words + (f"  eta {span(record['eta'])}" if record["eta"] else "")


def run(args):
    """What launch starts: hold the lock, frame the log, hand on a TERM, end as the stage ended."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # as nohup does; make and the stages inherit it
    lock, log, began = int(os.environ.pop("JOB_LOCK")), Path(os.environ["JOB_LOG"]), time.time()
    os.set_inheritable(lock, True)
    command = re.sub(r"\?\S+", "?***", re.sub(r"//\S*@", "//***@", " ".join(args.command)))
    os.write(lock, json.dumps({"job": args.job, "pid": os.getpid(), "born": psutil.Process().create_time(),
                               "host": socket.gethostname(), "since": time.strftime("%FT%T"), "command": command,
                               "log": str(log), "dirs": [str(d) for d in args.dirs]}).encode())
    print(f"== {time.strftime('%FT%T')} {stage.commit()} {socket.gethostname()}: {command}", flush=True)
    process = subprocess.Popen(args.command, pass_fds=[lock], cwd=stage.ROOT)  # inherited: held while anything lives
    signal.signal(signal.SIGTERM, lambda *_: signal_stage(args.dirs, family(log)))
    code = process.wait()
    code = code if code >= 0 else 128 - code
    record = current(args.dirs, args.job, began)
    if code and record.get("exit"):  # make says 2 whatever its stage said
        code = record["exit"]
    print(f"== {time.strftime('%FT%T')} exit {code}", flush=True)
    return code


def signal_stage(dirs, members, told=()):
    """TERM to the stage among `members`; to make, if none has begun.  Returns what was signalled, `told` included."""
    stages = {r["pid"] for r in records(dirs) if r["pid"] in members and alive(r["pid"], r["born"])}
    told = set(told)
    for process in members.values():
        with suppress(psutil.NoSuchProcess):
            if process not in told and (process.pid in stages or not stages and process.name() == "make"):
                process.terminate()
                told.add(process)
    return told


def tail(args):
    log, lock = LOGS / f"{args.job}.log", LOGS / f"{args.job}.lock"
    if not log.exists():
        raise stage.Refused(f"{args.job} was never launched: there is no {log}")
    with open(log, errors="replace") as file:
        print(*file.read().splitlines()[-40:], sep="\n", flush=True)
        while True:
            going = held(lock)  # asked before reading: what is written in between is still read
            text = file.read()
            print(text, end="", flush=True)
            if not going:
                break
            time.sleep(0.5)
        file.seek(0)
        last = re.findall(r"^== .*", file.read(), re.MULTILINE)[-1:]  # of this run, not of one before it
    ended = re.search(r" exit (\d+)$", *last) if last else None
    if not ended:
        print(f"{args.job} ended without a word: it was killed, or the machine went down")
    return int(ended[1]) if ended else 1


def stop(args):
    """The job of this name, and the stages that run in its directories without having been launched."""
    log, runner = LOGS / f"{args.job}.log", holder(LOGS / f"{args.job}.lock").get("pid")
    until, said, told, killed = time.time() + settings.number("STOP_WAIT", 900, time="s"), 0.0, set(), set()
    seen = found = family(log) | foreground(args.dirs)
    if not seen:
        print(f"{args.job} is not running")
        return 0
    while left := [m for m in seen.values() if lives(m)]:
        now = time.time()
        if now > until + 30:
            break
        if now > until:  # the runner ends by itself, and notes how
            killed |= {m for m in left if m.pid != runner or now > until + 10}
            for process in killed.intersection(left):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            told = signal_stage(args.dirs, found, told)  # a stage that ended well may be followed by another
        if now - said > 10:
            said, record = now, last_of(args.dirs, seen)
            print(f"stopping; {how(record)}" if record else "stopping", flush=True)
        time.sleep(0.2)
        found = family(log) | foreground(args.dirs)
        seen = seen | found
    record = last_of(args.dirs, seen)
    print(f"stopped{f', after killing {len(killed)} processes' if killed else ''}"
          + (f": {record['stage']} at {record['unit']} {record['done']} of {record['total']}" if record.get("total") else ""))
    if left:
        print(f"still there: {' '.join(str(p.pid) for p in left)}")
    return 1 if left else 0


def last_of(dirs, members):
    """The record of the stage among `members` that gave a sign of life last, or {}."""
    return max((r for r in records(dirs) if r["pid"] in members), key=lambda r: r["beat"], default={})


def foreground(dirs):
    """The stages that run in `dirs` and their descendants, unless they belong to some launched job."""
    found = {}
    for record in records(dirs):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if record["host"] == socket.gethostname() and alive(record["pid"], record["born"]):
                leader = psutil.Process(record["pid"])
                if "JOB_LOG" not in leader.environ():
                    found |= {m.pid: m for m in (leader, *leader.children(recursive=True))}
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["launch", "run", "tail", "stop"])
    p.add_argument("job", help="name of the job: its log is logs/JOB.log")
    p.add_argument("--dirs", nargs="+", type=Path, default=[], help="folders of the run's stage directories")
    own, _, command = " \0".join(sys.argv[1:]).partition(" \0-- \0")
    args = p.parse_args(own.split(" \0"))
    args.command = command.split(" \0")
    try:
        sys.exit({"launch": launch, "run": run, "tail": tail, "stop": stop}[args.what](args))
    except stage.Refused as refused:
        print(f"refused: {refused}")
        sys.exit(2)
    except (KeyboardInterrupt, BrokenPipeError):  # the job goes on
        sys.exit(130)


if __name__ == "__main__":
    main()
