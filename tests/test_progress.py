"""Lines that can be tailed and a heartbeat that can be polled, from processes of their own.

Example
    python -m pytest tests/test_progress.py
"""
import contextlib
import json
import os
import pty
import random
import signal
import subprocess
import sys
import time

import progress
import pytest

HEAD = "import os, sys, time\nfrom pathlib import Path\nimport progress, stage\nOUT = Path(sys.argv[1])\n"


@pytest.fixture
def start(tmp_path, environment):
    """start(body, **settings): a process that runs `body`; OUT is its stage directory, stdout a pipe unless given."""
    running = []

    def begin(body, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings):
        (tmp_path / "out").mkdir(exist_ok=True)
        script = tmp_path / "99_talk.py"
        script.write_text(HEAD + body)
        env = environment | {k: str(v) for k, v in settings.items()}
        assert "PYTHONUNBUFFERED" not in env
        process = subprocess.Popen([sys.executable, script, tmp_path / "out"], env=env, stdout=stdout, stderr=stderr)
        running.append(process)
        return process
    yield begin
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def said(start):
    """said(body): the lines of a process that ran `body` and ended well."""
    def run(body, **settings):
        process = start(body, **settings)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        return out.decode().split("\n")[:-1]
    return run


def test_lines_keep_coming_while_the_main_thread_is_busy(start):
    began, times = time.monotonic(), []
    process = start("progress.start(OUT)\nprogress.phase('loading')\ntime.sleep(3)\n", LOG_EVERY=0.4)
    for line in process.stdout:
        assert b"99_talk" in line and b"loading" in line
        times.append(time.monotonic())
    ended = time.monotonic()
    gaps = [b - a for a, b in zip([began, *times], [*times, ended])]
    assert len(times) >= 4 and max(gaps) < (ended - began) / 2, gaps


def test_a_line_arrives_before_the_process_ends_and_a_kill_loses_none(start, tmp_path):
    log, count = tmp_path / "talk.log", tmp_path / "count"
    with open(log, "wb") as file:
        process = start(f"count = os.open({str(count)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
                        "for k in range(10**9):\n"
                        "    progress.log(f'line {k}')\n"
                        "    os.write(count, b'.')\n"
                        "    time.sleep(0.001)\n", stdout=file)
    deadline = time.monotonic() + 60
    while not log.stat().st_size and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    assert log.stat().st_size and process.poll() is None
    time.sleep(random.uniform(0, 0.2))
    process.kill()
    process.wait()
    lines = log.read_text().splitlines()
    assert len(lines) >= count.stat().st_size
    assert [line.split()[-1] for line in lines] == [str(k) for k in range(len(lines))]


def test_no_control_character_reaches_the_log(said):
    evil = "a\\r\\x1b[31mred\\x1b]0;t\\x07\\n\\x00\\u2028\\u202e\\x9b2J\\ud83d b"
    lines = said(f"evil = '{evil}'\nprogress.start(OUT)\nprogress.phase(evil, 3, 'row')\nprogress.advance(1, text=evil)\n"
                 "with progress.aside(evil):\n    time.sleep(0.5)\n"
                 "progress.log(evil)\nprogress.advance(2)\ntime.sleep(0.5)\nprogress.phase('end' + evil)\nprogress.stop()\n", LOG_EVERY=0.2)
    assert len(lines) >= 6 and all(line.isprintable() for line in lines), lines
    assert sum("red" in line for line in lines) == len(lines) and all(line[2] == line[5] == ":" for line in lines)


def test_a_counting_phase_ends_with_all_of_its_units(said):
    lines = said("progress.start(OUT)\nprogress.phase('first', 7, 'row')\nfor _ in range(7): progress.advance(loss='0.5')\n"
                 "progress.phase('second', 3, 'step', done=1)\nprogress.advance(2)\nprogress.stop()\n")
    assert "first: 7 rows" in lines[0] and "row 7/7  100.0%  loss 0.5" in lines[1]
    assert "second: 1 of 3 steps done" in lines[2] and "step 3/3  100.0%" in lines[3] and len(lines) == 4
    assert "loss" not in lines[3]  # a number of the phase before


def test_an_empty_phase_says_so_without_a_fault(said):
    lines = said("progress.start(OUT)\nprogress.phase('nothing', 0, 'row')\ntime.sleep(0.5)\nprogress.stop()\n", LOG_EVERY=0.2)
    assert "nothing: 0 rows" in lines[0] and all("row 0/0" in line for line in lines[1:]) and len(lines) > 1


def test_an_aside_keeps_the_counters(said, tmp_path):
    lines = said("progress.start(OUT)\nprogress.phase('training', 10, 'step')\nprogress.advance(4, loss='2.5')\n"
                 "with progress.aside('writing checkpoint'):\n    time.sleep(0.7)\n    progress._save()\n"
                 "    print((OUT / 'progress.json').read_text(), end='', flush=True)\n"
                 "try:\n    with progress.aside('validating'): raise KeyError\nexcept KeyError: pass\n"
                 "progress.advance(5)\ntime.sleep(0.7)\nprogress.advance(1)\nprogress.stop()\n", LOG_EVERY=0.3)
    inside, = (json.loads(line) for line in lines if line.startswith("{"))
    assert (inside["phase"], inside["done"], inside["total"]) == ("writing checkpoint", 4, 10)
    told = [line.endswith("writing checkpoint") for line in lines].index(True)
    assert "step 4/10" in lines[told - 1]  # what was done is said before the pause
    assert sum("writing checkpoint (" in line for line in lines) >= 1
    after = lines[[line.endswith("validating") for line in lines].index(True) + 1:]
    assert any("step 9/10" in line and "loss 2.5" in line and "step/s" in line for line in after)
    assert "step 10/10" in after[-1] and not any("writing" in line or "validating" in line for line in after)
    left = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert (left["phase"], left["done"], left["metrics"]) == ("training", 10, {"loss": "2.5"})


def test_progress_json_is_whole_at_every_read(start, tmp_path):
    process = start("progress.start(OUT)\nfor k in range(10**9): progress.phase('p' * (k % 5000), k, 'row')\n",
                    stdout=subprocess.DEVNULL)
    path, until, seen = tmp_path / "out" / "progress.json", None, set()
    while until is None or time.monotonic() < until:
        assert process.poll() is None
        if path.exists():
            until = until or time.monotonic() + 1
            seen.add(json.loads(path.read_bytes())["total"])
    assert len(seen) > 20
    process.kill()
    process.wait()
    assert json.loads(path.read_bytes()).keys() == {"stage", "phase", "done", "total", "unit", "rate", "eta", "metrics",
                                                    "pid", "host", "advanced", "seconds", "state", "eta_all", "waits",
                                                    "born", "job", "beat", "phases"}


def test_progress_json_tells_rate_and_time_left(said, tmp_path):
    said("progress.start(OUT)\nprogress.phase('work', 100, 'row')\n"
         "for _ in range(20): time.sleep(0.05); progress.advance()\nprogress.stop()\n")
    left = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert left["stage"] == "99_talk" and left["done"] == 20 and 0 < left["rate"] <= 20
    assert left["eta"] == pytest.approx(80 / left["rate"], rel=0.2)
    assert left["pid"] > 0 and left["seconds"] >= 1


def test_only_the_first_rank_speaks(said, tmp_path):
    body = "progress.start(OUT)\nprogress.phase('work', 2, 'row')\nprogress.advance(2)\ntime.sleep(0.5)\nprogress.stop()\n"
    assert said(body, RANK=1, LOG_EVERY=0.2) == [] and not (tmp_path / "out" / "progress.json").exists()
    assert len(said(body, RANK=0, LOG_EVERY=0.2)) >= 2 and (tmp_path / "out" / "progress.json").exists()


def test_stopping_twice_says_nothing_twice(said):
    once = said("progress.start(OUT)\nprogress.phase('work', 2, 'row')\nprogress.advance(2)\nprogress.stop()\n")
    twice = said("progress.start(OUT)\nprogress.phase('work', 2, 'row')\nprogress.advance(2)\nprogress.stop()\nprogress.stop()\n")
    assert len(twice) == len(once) == 2
    assert said("progress.stop()\n") == []


def test_an_exception_ends_the_stage_though_its_threads_still_run(start):
    process = start("import threading\ndef main():\n    progress.start(OUT)\n    progress.phase('work', 9, 'row')\n"
                    "    threading.Thread(target=time.sleep, args=(300,)).start()\n    progress.advance(3)\n    raise OSError('no such thing')\n"
                    "stage.run(main)\n")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and b"row 3/9" in out, err
    lines = out.decode().splitlines()
    assert "failed: OSError: no such thing" in lines[-2] and "row 3/9" in lines[-1] and all(line[2] == ":" for line in lines)


def test_a_log_on_a_full_disk_stops_no_stage(start, tmp_path):
    with open("/dev/full", "wb") as full:
        process = start("def main():\n    progress.start(OUT)\n    progress.phase('work', 1, 'row')\n    progress.advance()\n"
                        "    stage.finish(OUT, 1, 1, {})\nstage.run(main)\n", stdout=full)
    _, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    assert process.returncode in (0, 2) and (process.returncode == 2 or (tmp_path / "out" / "done.json").exists())


def test_a_signal_that_comes_while_the_bar_is_drawn_stops_the_stage_in_order(start, tmp_path):
    ours, theirs = pty.openpty()
    process = start("import signal\ndef main():\n    stage._own_the_log(OUT / 'libraries.log')\n    progress.start(OUT)\n"
                    "    signal.signal(signal.SIGUSR1, lambda *_: progress.log('heard'))\n    progress.phase('work', 10**9, 'row')\n"
                    "    while True:\n        progress.advance()\n        progress._State.bar.refresh()\n        stage.check_stop()\n"
                    "stage.run(main)\n", stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while seen.count(b"heard") < 400:
        if b"work:" in seen:
            time.sleep(random.uniform(0, 0.003))  # else it would come just after a write, at the same place again and again
            process.send_signal(signal.SIGUSR1)
        seen += os.read(ours, 65536)
    process.terminate()
    with contextlib.suppress(OSError):  # a terminal that everybody has left
        while True:
            seen += os.read(ours, 65536)
    assert process.wait(60) == 143 and b"the same command goes on from here" in seen
    os.close(ours)


def test_a_stall_after_the_very_first_unit_is_seen(said):
    lines = said("progress.start(OUT)\nprogress.phase('work', 9, 'row')\ntime.sleep(0.2)\nprogress.advance()\ntime.sleep(3)\n"
                 "progress.advance(8)\nprogress.stop()\n", LOG_EVERY=0.4, STALL_AFTER=1)
    assert sum("stalled: no row for" in line for line in lines) == 1 and sum("moving again" in line for line in lines) == 1, lines


def test_of_many_units_in_flight_the_first_to_end_does_not_foretell_a_day(said, tmp_path):
    said("progress.start(OUT)\nprogress.phase('work', 640, 'row', flight=64)\ntime.sleep(1)\nprogress.advance()\nprogress._save()\n"
         "print((OUT / 'progress.json').read_text(), flush=True)\nprogress.stop()\n")
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["eta"] < 40  # not 640: half a wave a second


def test_seconds_are_said_as_people_say_them():
    assert [progress.span(s) for s in (0, 59.9, 60, 190, 3599, 3600, 36720, 86399, 86400, 371000)] == [
        "0s", "59s", "1m00s", "3m10s", "59m59s", "1h00m", "10h12m", "23h59m", "1d00h", "4d07h"]
