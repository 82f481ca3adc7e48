"""Run the project's own commands as a user would, and kill them as a machine would."""
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def script(name, *flags, code=0, **env):
    """Run scripts/NAME.py to its end; its exit code must be `code`; returns what it printed."""
    done = subprocess.run([sys.executable, ROOT / "scripts" / f"{name}.py", *map(str, flags)], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, **env}, timeout=1200)
    assert done.returncode == code, done.stdout
    return done.stdout


def make(*words, code=0, **env):
    """Run make with this interpreter as PYTHON."""
    done = subprocess.run(["make", "--no-print-directory", f"PYTHON={sys.executable}", *map(str, words)], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **env}, timeout=1200)
    assert done.returncode == code, done.stdout
    return done.stdout


def kill_when(command, ready, delay=0.0, **env):
    """Start a command, wait until ready() or its end, then `delay` seconds more, kill -9 it and wait for its children's
    death; returns its output and whether it was still running."""
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env={**os.environ, **env})
    end = time.monotonic() + 600
    while process.poll() is None and not ready() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(delay)
    running = process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True) if running else []
    process.kill()
    output, _ = process.communicate()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, alive
    return output, running
