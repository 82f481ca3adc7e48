"""One line a stage of every run: done, running, stalled, died, stopped or waiting; how far, how fast, when it ends.

Example
    python scripts/status.py runs                  ssh box make -sC eaglet status
    python scripts/status.py runs --json           {stages: [{run, stage, state, ...}], jobs: [...]}, for programs
    python scripts/status.py runs --watch          anew every 2 seconds, on a terminal

Reads   done.json and progress.json of every stage directory below the folders named; logs/*.lock: the launched jobs
Writes  nothing

state   done       done.json is there
        running    its process lives and its heartbeat is young; stalled: it does not advance, and for what it waits
        stopped, refused, failed     as it ended itself
        died       its process is gone, or another one has its number; no word was left
        silent     its process lives, or is on another machine, and has given no sign of life for a minute
        waiting    not begun, while an earlier stage of the run exists
"""
import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

import job
import progress
import stage
from progress import STAGES, span

FACTS = ("acceptance_length", "speedup", "steps", "tokens")
SILENT = 60.0  # seconds; progress.json is written every 5


def look(directory):
    """What is known of one stage directory: {state, seconds, rows_out, ...}; progress.json's fields while it is unfinished."""
    try:
        return json.loads((directory / "done.json").read_text()) | {"state": "done"}
    except (OSError, ValueError, TypeError):
        pass
    now = progress.read(directory)
    if not now:
        return {"state": "waiting"}
    if now["state"] in ("running", "stalled"):
        if now["host"] == socket.gethostname() and not job.alive(now["pid"], now["born"]):
            now["state"] = "died"
        elif time.time() - now["beat"] > SILENT:
            now["state"] = "silent"
    return now


def runs(roots):
    """{stage directory: what is known} of every run, in the order of the flow; what has not begun included."""
    begun, found, level = set(), {}, [Path(root) for root in roots]
    for _ in range(4):  # RUNS/TARGET/DATA/NAME
        begun |= {folder / s for folder in level for s in STAGES if (folder / s / "args").exists()}
        level = [Path(e.path) for folder in level for e in entries(folder) if e.is_dir() and e.name not in STAGES]
    for data in sorted({d.parent for d in begun if d.name in STAGES[:3]}):
        drafts = sorted({d.parent for d in begun if d.parent.parent == data})
        for directory in [data / s for s in STAGES[:3]] + [d / s for d in drafts for s in STAGES[3:]]:
            found[directory] = look(directory)
    return found | {d: look(d) for d in sorted(begun - found.keys())}


def line(now, head):
    """The stage in words."""
    if now["state"] == "waiting":
        return "waiting"
    if now["state"] == "done":
        finished, rows, commit = (now.get(k, "?") for k in ("finished", "rows_out", "commit"))
        took = span(now["seconds"]) if "seconds" in now else "?"
        drops = f", dropped {sum(now['dropped'].values())}" if now.get("dropped") else ""
        facts = "".join(f"  {k} {now[k]}" for k in FACTS if k in now)
        facts += "".join(f"  {v:.2f} of the planned {k}" for k, v in now.get("of_plan", {}).items())
        return f"done {finished}  {took}  {rows} rows{drops}{facts}  {commit}" + ("" if commit == head else f" (now {head})")
    parts = [now["state"] + (f" on {now['host']}" if now["host"] != socket.gethostname() else ""), now["phase"]]
    if now["total"]:
        parts += [f"{now['done']}/{now['total']} {now['unit']}s", f"{100 * now['done'] / now['total']:.1f}%"]
    parts += [f"{k.replace('_', '-')} {v}" for k, v in now["metrics"].items()]
    if now["state"] == "running":
        parts += [f"{now['rate']:.3g} {now['unit']}/s"] if now["rate"] else []
        parts += [f"eta {span(now['eta'])}"] if now["eta"] else []
        parts += [f"all {span(now['eta_all'])}"] if now["eta_all"] else []
    elif now["state"] in ("stalled", "silent"):
        parts += [f"no advance for {since(now['advanced'])}", now["waits"]]
    else:
        parts += [f"{since(now['beat'])} ago", now.get("cause", "")]
    return "  ".join(p for p in parts if p)


def since(when):
    return span(time.time() - when) if when else "?"


def size(directory):
    """Bytes of the files of a stage; of its folders only one level down, where checkpoints and data sets lie."""
    total, folders = 0, [directory, *(e.path for e in entries(directory) if e.is_dir())]
    for file in (e for folder in folders for e in entries(folder) if e.is_file()):
        try:
            total += file.stat().st_size
        except OSError:  # gone meanwhile
            pass
    return total


def entries(folder):
    """What lies in a folder; nothing, if it has gone meanwhile."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def report(roots):
    stages = [now | {"run": str(d.parent), "stage": d.name, "bytes": size(d)} for d, now in runs(roots).items()]
    return stages, job.running()


def show(roots):
    head = stage.commit()
    stages, jobs = report(roots)
    width = max((len(f"{s['run']}/{s['stage']}") for s in stages), default=0)
    lines = [f"{s['run'] + '/' + s['stage']:<{width}} {progress.size(s['bytes']):>8}  {line(s, head)}" for s in stages]
    lines += [f"job {j['job']}: since {j['since']}, pid {j['pid']}, {j['log']}" for j in jobs]
    return "\n".join(lines) or f"no stage has begun below {' '.join(map(str, roots))}"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("roots", nargs="*", type=Path, default=[Path("runs")], help="folders of runs (default runs)")
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--watch", action="store_true", help="anew every 2 seconds, on a terminal")
    args = p.parse_args()
    if args.json:
        stages, jobs = report(args.roots)
        print(json.dumps({"stages": stages, "jobs": jobs}, indent=1))
        return
    print(show(args.roots))
    while args.watch and sys.stdout.isatty():
        time.sleep(2)
        text = show(args.roots)
        print(f"\x1b[H\x1b[2J{time.strftime('%H:%M:%S')}\n{text}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
