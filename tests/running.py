"""Run the project's own commands as a user would, and kill them as a machine would."""
import json
import os
import random
import subprocess
import sys
import threading
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


class Watched:
    """A command under nohup, as one starts it over ssh, `nohup … > LOG 2>&1 < /dev/null`, whose log is read as it grows.

    lines: [(seconds since the start when the line was there, text)]; took: seconds to its end, None before; code.
    """

    def __init__(self, command, log, **env):
        assert "PYTHONUNBUFFERED" not in env
        env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {k: str(v) for k, v in env.items()}
        self.log, self.lines, self.took, self.code = Path(log), [], None, None
        with open(log, "wb") as file:
            self.began = time.monotonic()
            self.process = subprocess.Popen(["nohup", sys.executable, *map(str, command)], cwd=ROOT, env=env, stdout=file,
                                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self):
        with open(self.log, newline="\n") as file:  # \r stays what it is
            part = ""
            while True:
                code = self.process.poll()
                now, text = time.monotonic() - self.began, file.read()
                *whole, part = (part + text).split("\n")
                self.lines += [(now, line) for line in whole]
                if code is not None:
                    self.lines += [(now, part)] if part else []
                    self.took, self.code = now, code
                    return
                time.sleep(0.05)

    def wait(self, timeout=600):
        """The exit code, once it has ended."""
        self.thread.join(timeout)
        assert self.code is not None, self.text()
        return self.code

    def until(self, *wanted, timeout=300):
        """The first line that holds all that is wanted, as soon as it is there."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            ended = self.code is not None
            for _, line in list(self.lines):
                if all(w in line for w in wanted):
                    return line
            if ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"no line holds {wanted}:\n{self.text()}")

    def text(self):
        return "\n".join(f"{t:6.1f}  {line}" for t, line in self.lines)

    def family(self):
        """Every process that descends from it now."""
        return psutil.Process(self.process.pid).children(recursive=True)


def gone(processes, within=60):
    """Whether all of these end in time; a zombie, which waits for its parent alone, has ended."""
    end = time.monotonic() + within
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def memory(pid):
    """Bytes that a process and those below it hold for themselves, what they share counted once; mapped files, which the
    kernel can drop, are not memory."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))
        except OSError:  # it has ended
            pass
    return total


def tokens(root, model, rows, seed=0):
    """02_prepare's directory below `root`, for rows of ids (of a byte tokenizer); a number is a row of so many random ones."""
    draw = random.Random(seed)
    rows = [[draw.randrange(3, 250) for _ in range(row)] if isinstance(row, int) else row for row in rows]
    answers = root / "01_generate"
    answers.mkdir(parents=True)
    answered = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "!"}],
                 "finish_reason": "length", "prompt_ids": ids[:4], "answer_ids": ids[4:]} for i, ids in enumerate(rows)]
    (answers / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answered))
    (answers / "done.json").write_text("{}")
    script("02_prepare", "--answers", answers, "--model", model, "--out", root / "02_prepare", "--max-seq-len", max(map(len, rows)))
    return root / "02_prepare"
