"""Jobs that are launched, judged, followed, stopped and seen by make, in a copy of the checkout whose numbered scripts are
small stages on the real stage.py and progress.py; at the end the real 04_train on two ranks.

Example
    python -m pytest tests/test_jobs.py
"""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import progress
import psutil
import pytest
import status
from conftest import ROOT, STAGES

SMALL = '''"""A small stage."""
import os, signal, subprocess, sys, time
from pathlib import Path
import progress, stage
{top}
def main():
    p = stage.arguments(__doc__)
    for name in ("prompts", "answers", "tokens", "states", "model", "draft", "out"):
        p.add_argument("--" + name, type=Path)
    p.add_argument("--eval-prompts", type=Path, nargs="*")
    out = stage.begin(p.parse_args())
{body}
    stage.finish(out, 1, 1, {{}})
stage.run(main)
'''
# Until a test lets it go on.
GATE = '''
progress.phase("waiting", 500, "step")
progress.advance(3)
while not Path("go").exists():
    stage.check_stop()
    time.sleep(0.05)
'''
# Saves when it is stopped.
STEPS = '''
progress.phase("training", 5000, "step")
for step in range(5000):
    if stage.stop_requested():
        with progress.aside("writing checkpoint"):
            time.sleep(float(os.environ.get("SLOW_DISK", 0)))
            stage.write(out / "checkpoint", str(step))
        raise stage.Stopped
    time.sleep(0.05)
    progress.advance(loss="0.5")
'''
QUICK = {"LOG_EVERY": "0.4", "STALL_AFTER": "2"}  # progress.json is written every half second


class Checkout:
    """A copy of the checkout with a target `t`; every process that it starts carries BOX in its environment."""

    def __init__(self, root, environment):
        self.root, self.logs, self.data = root, root / "logs", root / "runs" / "t" / "base"
        shutil.copy(ROOT / "Makefile", root)
        shutil.copytree(ROOT / "env", root / "env", ignore=shutil.ignore_patterns("local.env"))
        shutil.copytree(ROOT / "scripts", root / "scripts")
        self.environment = {k: v for k, v in environment.items() if k != "PYTHONPATH"} | {"BOX": str(root)}
        self.words = ["--no-print-directory", f"PYTHON={sys.executable}", "TARGET=t"]
        (root / "env" / "t.env").write_text("MODEL=model\nPROMPTS=prompts.jsonl\nEVAL_PROMPTS=prompts.jsonl\n")
        (root / "prompts.jsonl").touch()
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text("{}")

    def stage(self, number, body="", top=""):
        script, = (p for p in STAGES if p.name.startswith(number))
        (self.root / "scripts" / script.name).write_text(SMALL.format(top=top, body=textwrap.indent(body, "    ")))

    def finished(self):
        """Stages 01 to 03 of the data are done."""
        for name in progress.STAGES[:3]:
            (self.data / name).mkdir(parents=True)
            (self.data / name / "args").write_text("<>\n")
            (self.data / name / "done.json").write_text("{}")

    def popen(self, *command, **more):
        """The options of subprocess for a command that talks to nobody but the test."""
        env = self.environment | {k: more.pop(k) for k in list(more) if k.isupper()}
        return {"args": list(map(str, command)), "cwd": self.root, "env": env, "text": True, "stdin": subprocess.DEVNULL} | more

    def run(self, *command, code=0, **more):
        """What a command prints that must end by itself, with `code`."""
        ended = subprocess.run(**self.popen(*command, **more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
        assert ended.returncode == code, ended.stdout
        return ended.stdout

    def make(self, *words, **more):
        return self.run("make", *self.words, *words, **more)

    def job(self, what, name="t-base-base", *command, **more):
        """job.py without make, whose exit code is that of the job."""
        tail = ["--dirs", self.data, self.data / "base", *(["--", *command] if command else [])]
        return self.run(sys.executable, "scripts/job.py", what, name, *tail, **more)

    def start(self, *command, **more):
        return subprocess.Popen(**self.popen(*command, **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} | more),
                                start_new_session=True)

    def log(self, name="base"):
        path = self.logs / f"t-base-{name}.log"
        return path.read_text() if path.exists() else ""

    def lock(self, name="base"):
        return json.loads((self.logs / f"t-base-{name}.lock").read_text())

    def began(self, phase, directory="01_generate"):
        """The record of a living stage that is in `phase`."""
        def there():
            record = progress.read(self.data / directory)
            return record.get("phase") == phase and psutil.pid_exists(record["pid"]) and "exit" not in record
        wait(there)
        return progress.read(self.data / directory)

    def go(self):
        (self.root / "go").touch()

    def processes(self):
        """Every living process of this checkout."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("BOX") == str(self.root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                pass
        return found


def wait(ready, seconds=300):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def box(tmp_path, environment):
    checkout = Checkout(tmp_path, environment)
    for script in STAGES:
        checkout.stage(script.name[:2])
    yield checkout
    while left := checkout.processes():
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass


class Terminal:
    """A command on a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, box, *command, **more):
        self.master, inner = os.openpty()
        self.process = subprocess.Popen(**box.popen("setsid", "--ctty", *command, stdin=inner, **more), stdout=inner, stderr=inner)
        os.close(inner)
        self.text = ""

    def read(self, pattern, times=1):
        while len(re.findall(pattern, self.text)) < times:
            try:
                self.text += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # its last process has closed it
                pytest.fail(self.text)

    def interrupt(self):
        """Ctrl-C; the exit code."""
        os.write(self.master, b"\x03")
        code = self.process.wait(300)
        os.close(self.master)
        return code


@pytest.fixture
def unrelated():
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    assert process.poll() is None, "an unrelated process was signalled"
    process.kill()
    process.wait()


# --- launch detaches --------------------------------------------------------------------------------------------------

def test_launch_returns_while_its_job_lives_though_a_pipe_waits_for_its_output(box):
    box.stage("01", GATE)
    text = box.run("bash", "-c", f"make {' '.join(box.words)} launch GOAL=generate WAIT=0 | cat")
    assert "launched" in text and box.log().count("exit") == 0
    box.go()  # only now can the job end
    wait(lambda: "exit 0" in box.log())


def test_a_job_outlives_its_caller_and_a_hangup(box):
    box.stage("01", GATE)
    caller = box.start("bash", "-c", f"make {' '.join(box.words)} launch GOAL=generate WAIT=600 | cat")
    pid = box.began("waiting")["pid"]
    os.killpg(caller.pid, signal.SIGHUP)
    caller.communicate(timeout=300)
    runner = box.lock()["pid"]
    assert os.getsid(pid) == os.getsid(runner) == runner != caller.pid
    job = box.processes()
    assert {runner, pid} <= {p.pid for p in job}
    for process in job:
        streams = [os.readlink(f"/proc/{process.pid}/fd/{n}") for n in range(3)]
        assert streams[0] == "/dev/null" and all(s.startswith(str(box.logs)) for s in streams[1:]), streams
    for number in (signal.SIGHUP, signal.SIGINT):  # as a terminal would, that still were theirs
        os.killpg(runner, number)
    time.sleep(0.5)
    assert {p.pid for p in box.processes()} == {p.pid for p in job}
    box.go()
    wait(lambda: "exit 0" in box.log())


def test_the_log_is_appended_to_and_framed(box):
    box.run("git", "init", "-q")
    box.run("git", "add", "Makefile")
    box.run("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "commit", "-qm", "x")
    commit = box.run("git", "describe", "--always", "--dirty").strip()
    box.stage("01", "raise OSError('no such thing')")
    assert "no such thing" in box.make("launch", "GOAL=generate", code=2)
    box.stage("01")
    text = box.make("launch", "GOAL=generate", "CONCURRENCY=7", "SGLANG_ARGS=--tp-size 4")
    assert text.splitlines()[-1] == "done" and "no such thing" not in text
    first = rf"== \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d {commit} {socket.gethostname()}: make generate .*TARGET=t"
    frame = [line for line in box.log().splitlines() if line.startswith("==")]
    assert len(frame) == 4 and all(re.match(first, line) for line in frame[::2]), frame
    assert "CONCURRENCY=7" in frame[2] and "--tp-size 4" in frame[2] and "WAIT" not in frame[2] and "GOAL" not in frame[2]
    assert [re.sub(r"^== \S+ ", "", line) for line in frame[1::2]] == ["exit 1", "exit 0"]
    assert box.log().startswith("==") and "exit 0" in box.log().splitlines()[-1] and "no such thing" in box.log()


def test_a_run_is_launched_once_and_others_run_beside_it(box):
    box.finished()
    box.stage("04", GATE)
    for name in ("a", "b"):
        box.make("launch", "GOAL=train", f"NAME={name}", "WAIT=0")
        box.began("waiting", f"{name}/04_train")
    text = box.job("launch", "t-base-a", "make", "train", code=2)
    first = box.lock("a")
    assert text.startswith("refused: t-base-a runs already") and str(first["pid"]) in text and first["since"] in text
    assert len(text.splitlines()) == 1
    assert "refused: t-base-a runs already" in box.make("launch", "NAME=a", code=2)
    assert len(re.findall(r"^job t-base-[ab]: since \S+, pid \d+", box.make("status"), re.M)) == 2
    box.go()
    wait(lambda: not box.processes())
    assert "exit 0" in box.log("a") and "exit 0" in box.log("b")


def test_a_lock_that_nobody_holds_blocks_nothing(box, unrelated):
    box.finished()
    box.logs.mkdir()
    stale = {"job": "t-base-base", "pid": unrelated.pid, "born": 1.0, "since": "then", "host": "here", "command": "x"}
    for content in ("", "0", "nonsense", "[]", json.dumps(stale)):
        (box.logs / "t-base-base.lock").write_text(content)
        if content in ("0", json.dumps(stale)):
            assert "is not running" in box.make("stop") and "job" not in box.make("status")
        assert box.make("launch", "GOAL=extract").splitlines()[-1] == "done"
    assert box.log().count("exit 0") == 5


@pytest.mark.parametrize("value", ["--tp-size=4 --dp-size=2", """--json '{"a": [1, "b c"]}' *;touch "$HOME" (x) & y""", "a  b\\c"])
def test_a_launched_stage_gets_the_settings_as_they_were_typed(box, value):
    box.stage("01", "(out / 'came').write_text(os.environ['SGLANG_ARGS'])\n")
    box.make("launch", "GOAL=generate", "SGLANG_ARGS=" + value.replace("$", "$$"), "WAIT=600")
    assert (box.data / "01_generate" / "came").read_text() == value


def test_a_dry_run_of_launch_starts_nothing(box):
    box.make("-n", "launch", "GOAL=generate")
    assert not box.logs.exists() and not (box.root / "runs").exists() and not box.processes()


# --- secrets ----------------------------------------------------------------------------------------------------------

CANARY = "canary-7f3a"


def told(box):
    """Where the canary stands: files, and command lines of living processes."""
    files = [p for p in box.root.rglob("*") if p.is_file() and CANARY.encode() in p.read_bytes()]
    return files + [p.cmdline() for p in box.processes() if CANARY in " ".join(p.cmdline())]


def test_a_key_of_the_environment_reaches_the_stage_and_nobody_else(box):
    box.stage("01", f"(out / 'came').write_text(str(os.environ['API_KEY'] == {CANARY[:3]!r} + {CANARY[3:]!r}))\n" + GATE)
    text = box.make("launch", "GOAL=generate", "WAIT=0", API_KEY=CANARY)
    box.began("waiting")
    text += box.make("status", API_KEY=CANARY) + box.make("stop", API_KEY=CANARY) + box.job("tail", code=143, API_KEY=CANARY)
    assert (box.data / "01_generate" / "came").read_text() == "True"
    assert CANARY not in text and not told(box)


@pytest.mark.parametrize("url", [f"https://me:{CANARY}@example.org/v1", f"https://me:a/b@{CANARY}@example.org",
                                 f"https://example.org/v1?key={CANARY}"])
def test_an_address_with_a_password_is_refused_by_make_and_told_by_nobody(box, url):
    for goal in ("launch", "generate", "plan", "help"):
        text = box.make(goal, f"API={url}", "API_MODEL=m", code=2)
        assert "API_KEY" in text and CANARY not in text
    assert not box.logs.exists() and not box.processes()
    # by hand, with a command of one's own, which alone is seen as it was typed
    text = box.job("launch", "by-hand", "true", f"API={url}")
    assert CANARY not in text and not told(box)
    assert all("***" in (box.logs / f"by-hand.{end}").read_text() for end in ("lock", "log"))


# --- launch judges ----------------------------------------------------------------------------------------------------

def test_launch_tells_at_once_why_a_run_died(box):
    """WAIT is as long as a command of the test may take."""
    box.stage("01", "raise stage.Refused('prompts.jsonl line 3: no prompt')")
    text = box.job("launch", "t-base-base", "make", *box.words, "generate", code=2, WAIT="600")
    assert text.splitlines()[-1] == "refused: prompts.jsonl line 3: no prompt (exit 2)" and "*** [" in text
    box.stage("01", top="import nonesuch")
    text = box.make("launch", "GOAL=generate", "WAIT=600", code=2)
    assert "ModuleNotFoundError: No module named 'nonesuch'" in text and "line 3" not in text
    assert re.search(r"^died: .*\(exit \d+\)$", text, re.M)
    text = box.make("launch", "GOAL=nonsense", "WAIT=600", code=2)
    assert "No rule to make target 'nonsense'" in text and "nonesuch" not in text and "died" in text
    box.stage("01", "raise OSError('no such thing')")
    text = box.job("launch", "t-base-base", "make", *box.words, "generate", code=1, WAIT="first-step")
    assert text.splitlines()[-1] == "failed: OSError: no such thing (exit 1)"
    assert box.job("tail", code=1).splitlines()[-1].endswith("exit 1")


def test_a_stage_that_dies_after_another_is_done_is_not_judged_by_that_one(box):
    box.stage("02", "os.kill(os.getpid(), signal.SIGKILL)")
    text = box.make("launch", "GOAL=prepare", "WAIT=600", code=2)
    assert re.search(r"^died: .*\(exit \d+\)$", text, re.M) and "Killed" in text


def test_launch_refuses_a_wait_that_is_no_time(box):
    for wait_ in ("soon", "nan", "-1"):
        assert "WAIT" in box.make("launch", "GOAL=generate", f"WAIT={wait_}", code=2)
    assert not box.logs.exists() and not box.processes()
    assert "STOP_WAIT" in box.make("stop", "STOP_WAIT=soon", code=2)


def test_launch_waits_for_the_first_step_of_this_run(box):
    """Neither the files that are checked before nor the steps of an earlier run are the first step."""
    box.stage("01", 'progress.phase("checking the files", 9, "row")\nprogress.advance(1)\ntime.sleep(1)\nprogress.advance(8)\n'
                    'progress.phase("training", 5000, "step", done=70)\nwhile not Path("go").exists(): time.sleep(0.05)\n'
                    + STEPS.partition("\n")[2].replace('phase("training", 5000, "step")', 'advance()', 1))
    launch = box.start("make", *box.words, "launch", "GOAL=generate", "WAIT=first-step", **QUICK)
    box.began("training")
    time.sleep(1.5)
    assert launch.poll() is None
    box.go()
    text = launch.communicate(timeout=300)[0]
    steps = re.search(r"^01_generate: training, step (\d+) of 5000", text, re.M)
    assert launch.returncode == 0 and steps and int(steps[1]) > 70, text


def test_launch_says_what_goes_on_after_its_wait(box):
    box.stage("01", 'progress.phase("loading libraries")\n' + GATE.replace("progress.", "#"))
    for seconds in (2, 8, 32):  # on a machine that may be slow to begin
        text = box.make("launch", "GOAL=generate", f"WAIT={seconds}")
        box.began("loading libraries")
        if re.search(r"^01_generate: loading libraries \(\d+s\)$", text, re.M):
            break
        assert "no stage has begun yet" in text
        box.make("stop")
    else:
        pytest.fail(text)
    assert box.make("stop").count("stopped") == 1


def test_ctrl_c_in_launch_leaves_the_job_alone(box):
    box.stage("01", GATE)
    terminal = Terminal(box, "make", *box.words, "launch", "GOAL=generate", "WAIT=600")
    terminal.read("launched")
    pid = box.began("waiting")["pid"]
    assert terminal.interrupt() != 0 and "Traceback" not in terminal.text
    time.sleep(0.5)
    assert pid in [p.pid for p in box.processes()]


# --- tail -------------------------------------------------------------------------------------------------------------

def test_tail_follows_to_the_end_and_ctrl_c_leaves_the_job_alone(box):
    box.stage("01", STEPS)
    box.make("launch", "GOAL=generate", "WAIT=0", **QUICK)
    pid = box.began("training")["pid"]
    terminal = Terminal(box, "make", *box.words, "tail")
    terminal.read(r"step \d+/5000", times=3)  # it follows
    assert terminal.interrupt() != 0 and "Traceback" not in terminal.text
    follower = box.start(sys.executable, "scripts/job.py", "tail", "t-base-base")
    assert follower.stdout.readline().startswith("==")
    assert pid in [p.pid for p in box.processes()]
    assert "stopped: 01_generate at step" in box.make("stop")
    text = follower.communicate(timeout=300)[0]
    assert follower.returncode == 143 and text.splitlines()[-1].endswith("exit 143")
    assert (box.data / "01_generate" / "checkpoint").exists()
    assert box.job("tail", code=143).splitlines()[-1].endswith("exit 143")  # at once
    assert box.make("tail", code=2)


def test_tail_of_a_job_that_left_no_word_does_not_end_as_an_earlier_one(box):
    box.finished()
    box.make("launch", "GOAL=extract")
    box.job("tail")
    box.stage("04", GATE)
    box.make("launch", "GOAL=train", "WAIT=0")
    box.began("waiting", "base/04_train")
    for process in box.processes():
        process.kill()
    box.job("tail", code=1)


def test_tail_of_what_was_never_launched_is_refused(box):
    text = box.job("tail", "t-base-other", code=2)
    assert text.startswith("refused: t-base-other was never launched") and len(text.splitlines()) == 1


# --- stop -------------------------------------------------------------------------------------------------------------

def test_stop_lets_the_stage_save_and_signals_nobody_else(box):
    """The helper would tell of a TERM of its own; the stage needs it until the checkpoint is written."""
    helper = "trap 'touch signalled' TERM; touch ready; while :; do sleep 0.1; done"
    box.stage("01", f"helper = subprocess.Popen(['bash', '-c', {helper!r}])\n"
                    "while not Path('ready').exists(): time.sleep(0.05)\ntry:\n" + textwrap.indent(STEPS, "    ")
                    + "finally:\n    helper.kill()\n    helper.wait()\n")
    box.make("launch", "GOAL=generate", "WAIT=0", SLOW_DISK="3")
    box.began("training")
    text = box.make("stop", STOP_WAIT="300")
    assert "stopped: 01_generate at step" in text and "killing" not in text
    assert int((box.data / "01_generate" / "checkpoint").read_text()) >= 0
    assert not (box.root / "signalled").exists() and not box.processes()
    assert box.log().splitlines()[-1].endswith("exit 143")
    record = progress.read(box.data / "01_generate")
    assert (record["state"], record["exit"]) == ("stopped", 143)


def test_what_does_not_stop_is_killed_with_all_that_it_started(box):
    deaf = "trap '' TERM HUP INT; (trap '' TERM HUP; setsid sleep 1000) & touch ready; while :; do sleep 0.1; done"
    box.stage("01", "env = {k: os.environ[k] for k in ('BOX', 'PATH')}  # without the job's mark\n"
                    f"subprocess.Popen(['bash', '-c', {deaf!r}], start_new_session=True, env=env)\n"
                    "while not Path('ready').exists(): time.sleep(0.05)\nprogress.phase('deaf')\ntime.sleep(1000)\n")
    box.make("launch", "GOAL=generate", "WAIT=0")
    box.began("deaf")
    names = [p.name() for p in box.processes()]
    assert "sleep" in names and "bash" in names
    text = box.make("stop", "STOP_WAIT=1")
    assert re.search(r"stopped, after killing \d+ processes", text), text
    assert not box.processes()
    assert re.search(r"exit [1-9]\d*$", box.log().splitlines()[-1])
    assert "is not running" in box.make("stop")


def test_stop_also_stops_the_stage_that_follows_one_that_ended_well(box):
    box.stage("01", "progress.phase('ending')\nwhile not stage.stop_requested(): time.sleep(0.05)\n")
    box.stage("02", GATE)
    box.make("launch", "GOAL=prepare", "WAIT=0")
    box.began("ending")
    assert "killing" not in box.make("stop", STOP_WAIT="300")
    assert (box.data / "01_generate" / "done.json").exists() and not box.processes()
    assert re.search(r"exit 143$", box.log().splitlines()[-1])


def test_stop_before_any_stage_has_begun(box):
    box.stage("01", top="open('importing', 'w').close()\ntime.sleep(1000)")
    box.make("launch", "GOAL=generate", "WAIT=0")
    wait((box.root / "importing").exists)
    assert "killing" not in box.make("stop", STOP_WAIT="300")
    assert not box.processes() and box.log().splitlines()[-1].endswith("exit 143")


def test_term_to_the_runner_stops_the_job(box):
    """As a machine that shuts down does."""
    box.stage("01", STEPS)
    box.make("launch", "GOAL=generate", "WAIT=0")
    box.began("training")
    os.kill(box.lock()["pid"], signal.SIGTERM)
    wait(lambda: not box.processes())
    assert box.log().splitlines()[-1].endswith("exit 143") and (box.data / "01_generate" / "checkpoint").exists()


def test_an_unrelated_process_with_a_recycled_pid_is_never_signalled(box, unrelated):
    born = psutil.Process(unrelated.pid).create_time()
    own = {"state": "running", "host": socket.gethostname(), "job": "", "stage": "01_generate", "beat": time.time(),
           "pid": unrelated.pid}
    (box.data / "01_generate").mkdir(parents=True)
    (box.data / "01_generate" / "args").touch()
    for wrong in ({"born": born - 3600}, {"born": born + 3600}, {}, {"pid": 0, "born": 0}, {"pid": "0", "born": "x"},
                  {"pid": -1, "born": born}, {"pid": None, "born": None}, {"pid": 10**12, "born": born},
                  {"host": "elsewhere", "born": born}):
        (box.data / "01_generate" / "progress.json").write_text(json.dumps(own | wrong))
        assert "is not running" in box.make("stop", STOP_WAIT="0")
        assert unrelated.poll() is None, wrong
    assert "elsewhere" in box.make("status")


def test_stop_of_a_job_signals_no_other_process_that_its_records_name(box, unrelated):
    """The record of an earlier stage names a process that is there, and not of this job."""
    box.finished()
    record = {"state": "running", "host": socket.gethostname(), "job": "t-base-base", "stage": "03_extract", "beat": time.time(),
              "pid": unrelated.pid, "born": psutil.Process(unrelated.pid).create_time() - 100}
    (box.data / "03_extract" / "progress.json").write_text(json.dumps(record))
    box.stage("04", STEPS)
    box.make("launch", "GOAL=train", "WAIT=0")
    box.began("training", "base/04_train")
    assert "stopped: 04_train at step" in box.make("stop")
    assert not box.processes()


def test_a_run_in_the_foreground_is_stopped_too_but_not_that_of_another_job(box):
    box.stage("01", STEPS)
    foreground = box.start("make", *box.words, "generate")
    box.began("training")
    assert "stopped: 01_generate at step" in box.make("stop")
    text = foreground.communicate(timeout=300)[0]
    assert foreground.returncode == 2 and "the same command goes on" in text and not box.processes()
    (box.data / "01_generate" / "checkpoint").unlink()
    box.make("launch", "GOAL=generate", "NAME=a", "WAIT=0")
    box.began("training")
    assert "t-base-b is not running" in box.make("stop", "NAME=b")
    time.sleep(0.5)
    assert "exit" not in progress.read(box.data / "01_generate")
    assert "stopped" in box.make("stop", "NAME=a") and not box.processes()


def test_a_signal_to_make_does_not_undo_a_stage_that_is_done(box):
    """While the interpreter is still unloading its libraries; make would delete its target, which is never half written."""
    box.stage("01", top="import atexit\natexit.register(time.sleep, 2)")
    foreground = box.start("make", *box.words, "generate")
    wait((box.data / "01_generate" / "done.json").exists)
    os.killpg(foreground.pid, signal.SIGTERM)
    foreground.communicate(timeout=300)
    assert (box.data / "01_generate" / "done.json").exists()


# --- status -----------------------------------------------------------------------------------------------------------

MODES = '''
mode = os.environ["MODE"]
if mode == "refused":
    raise stage.Refused("line 3 is empty")
if mode == "failed":
    raise OSError("no such thing")
if mode == "stalled":
    progress.phase("training", 500, "step")
    progress.advance(4)
    time.sleep(1000)
if mode != "done":
    (out / "product").write_bytes(bytes(2_000_000))
''' + textwrap.indent(STEPS, "    ")


def lines(text):
    """{run and stage: the rest of its line}."""
    return {line.split()[0].removeprefix("runs/"): line for line in text.splitlines()}


def test_status_tells_how_every_stage_is(box):
    box.stage("01", MODES)
    (box.root / "logs").mkdir()
    modes = ["done", "running", "stalled", "died", "stopped", "refused", "failed", "silent"]
    started = {}
    for mode in modes:
        out = box.root / "runs" / mode / "01_generate"
        started[mode] = box.start(sys.executable, "scripts/01_generate.py", "--out", out, stdout=subprocess.DEVNULL, MODE=mode,
                                  LOG_EVERY="0.4", STALL_AFTER="2" if mode == "stalled" else "16")
    at = {mode: box.root / "runs" / mode / "01_generate" for mode in modes}
    wait(lambda: all(progress.read(at[mode]).get("done", 0) > 3 for mode in ("running", "died", "stopped", "silent")))
    started["died"].kill()
    started["stopped"].terminate()
    started["silent"].send_signal(signal.SIGSTOP)
    record = progress.read(at["silent"])
    (at["silent"] / "progress.json").write_text(json.dumps(record | {"beat": record["beat"] - 100}))
    wait(lambda: progress.read(at["stalled"]).get("state") == "stalled")
    wait(lambda: all(started[mode].poll() is not None for mode in ("done", "died", "stopped", "refused", "failed")))

    text = subprocess.run(["make", f"PYTHON={sys.executable}", "-sC", box.root, "status"], cwd="/", env=box.environment, text=True,
                          capture_output=True, timeout=60)
    assert text.returncode == 0 and not text.stderr
    found, table = lines(text.stdout), text.stdout.splitlines()
    assert len(table) == len(found) == 3 * len(modes)  # the stages on the same data that have not begun included
    words = {mode: re.sub(r"^\S+ +[\d.]+ [kMGT]?B +", "", found[f"{mode}/01_generate"]) for mode in modes}
    assert all(words[mode].startswith(mode) for mode in modes), words
    assert all(found[f"{mode}/02_prepare"].endswith("waiting") for mode in modes)
    assert re.match(r"running  training  \d+/5000 steps  \d\.\d%  loss 0\.5  [\d.]+ step/s  eta \d", words["running"])
    assert re.search(r" 2(\.\d+)? MB ", found["running/01_generate"])
    assert re.match(r"stalled  training  4/500 steps .* no advance for \d+s  code: main \(01_generate\.py:\d+", words["stalled"])
    assert re.match(r"died  training  \d+/5000 steps .* \d+s ago", words["died"])
    assert re.match(r"stopped  .*\d+/5000 steps .* ago  stopped by SIGTERM", words["stopped"])
    assert "line 3 is empty" in words["refused"] and "OSError: no such thing" in words["failed"]
    assert re.match(r"silent  training .* no advance for", words["silent"])
    assert re.match(r"done \S+  \d+s  1 rows", words["done"])

    report = json.loads(box.make("-s", "status", "JSON=1"))
    assert [f"{Path(s['run']).name}/{s['stage']}" for s in report["stages"]] == list(found) and report["jobs"] == []
    states = {Path(s["run"]).name: s for s in report["stages"] if s["stage"] == "01_generate"}
    assert {mode: s["state"] for mode, s in states.items()} == {mode: mode for mode in modes}
    assert states["running"]["total"] == 5000 and states["running"]["rate"] > 0 and states["running"]["bytes"] > 2_000_000
    assert states["failed"]["cause"] == "OSError: no such thing" and states["done"]["rows_out"] == 1
    started["stalled"].kill()


def test_status_reads_whatever_lies_there(box):
    """Torn, empty, of other versions: a question mark, no fault; nor may stop stumble over it."""
    records = ["", "{", "[]", "null", "7", "{}", '{"state": "running"}', '{"state": "stalled", "pid": "x", "host": null, "total": 5}',
               '{"state": "running", "pid": -3, "born": null}', '\x00\x00', "\xff"]
    for k, content in enumerate(records):
        for name in ("progress.json", "done.json"):
            out = box.root / "runs" / f"{name[0]}{k}" / "01_generate"
            out.mkdir(parents=True)
            (out / "args").touch()
            (out / name).write_bytes(content.encode("latin-1"))
    box.logs.mkdir()
    (box.logs / "t-base-base.lock").write_text("{")
    found = lines(box.make("-s", "status"))
    assert len(found) == 3 * 2 * len(records)
    assert "?" in found["p6/01_generate"] and "?" in found["d5/01_generate"] and "done" in found["d5/01_generate"]
    assert len(json.loads(box.make("-s", "status", "JSON=1"))["stages"]) == len(found)
    shutil.copytree(box.root / "runs", box.root / "copy")
    for k in range(len(records)):
        shutil.rmtree(box.root / "runs")
        shutil.copytree(box.root / "copy" / f"p{k}", box.data)
        if k in (1, 2, 7, 8):
            assert "is not running" in box.make("stop", STOP_WAIT="0")


def test_status_survives_directories_that_come_and_go(box):
    churn = box.start("bash", "-c", "while :; do mkdir -p runs/x/y/{01_generate,02_prepare}/{a,b};"
                                    "touch runs/x/y/{01_generate,02_prepare}/{args,a/{1..9},b/{1..9}}; rm -r runs/x; done")
    empty = there = 0

    def enough():
        nonlocal empty, there
        for _ in range(100):
            stages = [s["stage"] for s in status.report([box.root / "runs"])[0]]
            empty, there = empty + (not stages), there + ("02_prepare" in stages)
        return empty > 30 and there > 30
    wait(enough)
    assert churn.poll() is None


def test_status_is_watched_until_ctrl_c(box):
    box.finished()
    terminal = Terminal(box, "make", *box.words, "status", "WATCH=1")
    terminal.read(r"\x1b\[H\x1b\[2J\d\d:\d\d:\d\d\s+\S+/01_generate .* done", times=2)
    terminal.interrupt()
    assert "Traceback" not in terminal.text and not box.processes()
    assert len(box.make("status", "WATCH=1").splitlines()) == 3  # not on a terminal: once


# --- the real training ------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_stopped_while_a_disk_is_slow_two_ranks_leave_a_whole_checkpoint_and_no_process(box, prepared, tiny):
    import checkpoint

    shutil.copy(ROOT / "scripts" / "04_train.py", box.root / "scripts")
    shutil.copytree(prepared, box.data)
    for name in ("01_generate", "03_extract"):
        (box.data / name / "args").write_text("<>\n")
    (box.root / "env" / "t.env").write_text(f"MODEL={tiny}\nPROMPTS={box.data}/01_generate/rows.jsonl\n"
                                            "DRAFT_VOCAB=200\nEPOCHS=60\nBATCH_TOKENS=256\nPACK_TOKENS=128\nLR=2e-3\n")
    slow = box.root / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(textwrap.dedent('''
        import os, sys, time
        if "RANK" in os.environ and any("04_train" in word for word in sys.orig_argv):
            import torch.distributed.checkpoint as module
            save = module.save
            def slowly(*arguments, **options):
                time.sleep(5 if os.path.exists("slow/now") else 0)
                save(*arguments, **options)
            module.save = slowly
        '''))
    out = box.data / "base" / "04_train"
    settings = {"NPROC": "2", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    text = box.make("launch", "GOAL=train", "WAIT=first-step", PYTHONPATH=str(slow), **settings)
    assert re.search(r"^04_train: .*, step \d+ of \d+", text, re.M), text
    assert len([p for p in box.processes() if "04_train.py" in " ".join(p.cmdline())]) >= 3  # the leader and its ranks
    (slow / "now").touch()
    text = box.make("stop")
    assert "stopped: 04_train at step" in text and "killing" not in text and not box.processes()
    assert re.search(r"exit 143$", box.log().splitlines()[-1])
    newest, saved = checkpoint.newest(out / "checkpoints")
    assert saved["step"] > 0 and newest == max((out / "checkpoints").iterdir())
    text = box.make("launch", "GOAL=train", "WAIT=first-step", **settings)
    resumed = re.search(r"resuming at step (\d+)", box.log())
    assert resumed and int(resumed[1]) == saved["step"] and "launched" in text
    assert "killing" not in box.make("stop") and not box.processes()
    assert box.job("tail", code=143)
