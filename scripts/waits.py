"""What a process that does not advance waits for, read off the stacks of its threads.

    loader       the main thread is inside torch's DataLoader
    collective   it is inside torch.distributed, or in a backward pass that ends in one: for whom, the ranks' own files say
    server       some thread waits for an HTTP reply
    disk         some thread is inside a file of ours or of safetensors, or the kernel says so
    code         none of these: then the innermost function is the news
"""
import json
import os
import sys
import threading
import time
from pathlib import Path


def _frames(frame):
    """[(file, line, function)] of a stack, innermost first, up to what stage.run called."""
    found = []
    while frame is not None and not (frame.f_code.co_name == "run" and frame.f_code.co_filename.endswith("scripts/stage.py")):
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _inside(frames, *parts):
    return any(part in file for file, _, _ in frames for part in parts)


def main_thread():
    """(kind, place): what the main thread waits for, and the innermost function that says so."""
    stacks = {ident: _frames(frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    main = stacks.pop(threading.main_thread().ident, None) or [("", 0, "")]
    file, line, function = main[0]
    ranks = int(os.environ.get("WORLD_SIZE", 1)) > 1
    kind = "code"
    if _inside(main, "torch/utils/data/"):
        kind = "loader"
    elif _inside(main[:1], "torch/distributed/", "torch/nn/parallel/distributed.py") or ranks and function == "_engine_run_backward":
        kind = "collective"
    elif any(_inside(stack, "urllib3/connection", "http/client.py") for stack in (main, *stacks.values())):
        kind = "server"
    elif any(_inside(stack[:4], "scripts/states.py", "scripts/stage.py", "safetensors", "torch/serialization.py", "shutil.py")
             for stack in (main, *stacks.values())) or _blocked():
        kind = "disk"
    return kind, f"{function} ({Path(file).name}:{line})"


def _blocked():
    """Whether the kernel holds the main thread in an uninterruptible wait (state D), which is nearly always a disk."""
    try:
        return Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except OSError:
        return False


def for_whom(out):
    """What this process waits for, in words: of a collective also the ranks that are not in it, by .rank-N.json in `out`."""
    kind, place = main_thread()
    if kind != "collective" or out is None:
        return f"{kind}: {place}"
    away = []
    for path in sorted(out.glob(".rank-*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        rank = path.stem.removeprefix(".rank-")
        if time.time() - record["beat"] > 30:
            away.append(f"rank {rank} gives no sign of life")
        elif not record["waits"].startswith("collective"):
            away.append(f"rank {rank} is elsewhere, in {record['waits'] or 'code that moves'}")
    return f"{kind}: {'; '.join(away) or place}"
