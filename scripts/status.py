"""One line a stage of every run: done or how far, what it cost, which commit made it.

Example
    python scripts/status.py runs

Reads   done.json and progress.json of every stage directory below the folders named
Writes  nothing
"""
import json
import socket
import sys
import time
from pathlib import Path

import stage
from progress import span


def line(directory, head):
    if (directory / "done.json").exists():
        done = json.loads((directory / "done.json").read_text())
        drops = f", dropped {sum(done['dropped'].values())}" if done["dropped"] else ""
        old = "" if done["commit"] == head else f" (now {head})"
        facts = "".join(f"  {k} {done[k]}" for k in ("acceptance_length", "speedup", "steps") if k in done)
        return f"done {done['finished']}  {span(done['seconds'])}  {done['rows_out']} rows{drops}{facts}  {done['commit']}{old}"
    try:
        now = json.loads((directory / "progress.json").read_text())
    except (OSError, ValueError):
        return "begun"
    here = now["host"] == socket.gethostname()
    how = "stopped" if here and not Path(f"/proc/{now['pid']}").exists() else "running" if here else f"on {now['host']}"
    far = f"  {now['done']}/{now['total']} {now['unit']}s" if now["total"] else ""
    eta = f"  eta {span(now['eta'])}" if now["eta"] and how != "stopped" else ""
    return f"{how}  {now['phase']}{far}{eta}  last advance {span(time.time() - now['advanced'])} ago"


def main():
    head = stage.commit()
    found = sorted(p.parent for root in sys.argv[1:] for p in Path(root).glob("**/[0-9][0-9]_*/args") if "." not in p.parent.name)
    for directory in found:
        print(f"{str(directory):<44} {line(directory, head)}")
    if not found:
        print(f"no stage has begun below {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
