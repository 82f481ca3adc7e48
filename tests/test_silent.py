"""No stage is ever silent: every stage under nohup, and with faults planted in what it calls, told apart by its log.

LOG_EVERY and STALL_AFTER are scaled down.  What is asserted of time: a line is due every LOG_EVERY and may come 2.5 times
as late, since other processes use these cores too; an ETA is right within 20 % of the time then left, or 10 s.  Faults are
planted by a sitecustomize.py, in third-party code only.
"""
import fcntl
import json
import os
import pstats
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
import tiny as model_maker
from running import ROOT, Watched, gone, script

pytestmark = pytest.mark.slow
EVERY = 3.0
STAMPED = re.compile(r"\d\d:\d\d:\d\d 0[1-5]_\w+ +\S")
ETA = re.compile(r"  eta (over )?((?:\d+[dhms])+)")
UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
TRAIN = ["--draft-vocab", 200, "--batch-tokens", 256, "--pack-tokens", 128, "--lr", "2e-3"]


started = []


@pytest.fixture(autouse=True)
def nothing_outlives_a_test():
    """A run that a failed test leaves waiting in its planted fault is killed with all it started."""
    yield
    while started:
        watched = started.pop()
        if watched.code is None:
            for process in [*watched.family(), watched.process]:
                process.kill()
            watched.wait()


def run(stage, flags, log, **env):
    """Start a numbered script under nohup with lines due every EVERY seconds.  CONCURRENCY: many waves of requests, since all
    answers of the tiny target are as long, which no estimate can see before the first wave ends."""
    started.append(Watched([f"scripts/{stage}.py", *flags], log, **{"LOG_EVERY": EVERY, "OMP_NUM_THREADS": 1, "CONCURRENCY": 8} | env))
    return started[-1]


def training(prepared, tiny, out, *flags, epochs=3):
    return ["--tokens", prepared / "02_prepare", "--states", prepared / "03_extract", "--model", tiny, "--out", out, *TRAIN,
            "--epochs", epochs, *flags]


def generating(questions, tiny, out):
    return ["--prompts", questions, "--model", tiny, "--out", out, "--temperature", "1.0", "--answer-tokens", 64,
            "--generate-dtype", "float32"]


def spoken(text):
    """The lines without the stacks that faulthandler prints where a library holds the interpreter's lock: on a machine in
    need even an import does.  A test of its own asks for them."""
    stack = re.compile(r"(Timeout \(|Thread 0x|Current thread 0x|  File |  <|  \.\.\.|$)")
    return [line for line in text.split("\n") if not stack.match(line)]


def seconds(text):
    return sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([dhms])", text))


def etas(watched):
    """[(seconds to the last line when the line was there, seconds that it promises, whether `over`, line)]."""
    found = [(watched.lines[-1][0] - t, ETA.search(line), line) for t, line in watched.lines]
    return [(left, seconds(m[2]), bool(m[1]), line) for left, m, line in found if m]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tree of runs as make lays it out, so that a stage finds the history beside it."""
    root = tmp_path_factory.mktemp("silent")
    (root / "runs/t/base/base").mkdir(parents=True)
    (root / "questions.jsonl").write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"Tell me about {i}."}) + "\n" for i in range(160)))
    return root


@pytest.fixture(scope="module")
def flow(place, prepared, tiny):
    """{stage: its run}, every stage once, without history, on a quiet path of its own."""
    data, run_ = place / "runs/t/base", place / "runs/t/base/base"
    model_maker.answer(place / "answers", 1000)
    flags = {
        "01_generate": generating(place / "questions.jsonl", tiny, data / "01_generate"),
        "02_prepare": ["--answers", place / "answers", "--model", tiny, "--out", data / "02_prepare"],
        "03_extract": ["--tokens", data / "02_prepare", "--model", tiny, "--out", data / "03_extract", "--extract-dtype", "float32"],
        "04_train": training(prepared, tiny, run_ / "04_train", epochs=20),
        "05_eval": ["--draft", run_ / "04_train", "--model", tiny, "--eval-prompts", data / "02_prepare/heldout.jsonl", "--out",
                    run_ / "05_eval", "--eval-rows", 32, "--eval-tokens", 48, "--eval-dtype", "float32", "--eval-concurrency", 8, "--eval-rounds", 1]}
    done = {}
    for stage, words in flags.items():
        done[stage] = run(stage, words, place / f"{stage}.log")
        assert done[stage].wait() == 0, done[stage].text()
        print(stage, round(done[stage].took), "s", *done[stage].text().splitlines(), sep="\n")
    return done


STAGES = ["01_generate", "02_prepare", "03_extract", "04_train", "05_eval"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_under_nohup_is_never_silent(flow, stage):
    watched = flow[stage]
    times = [0.0, *(t for t, line in watched.lines if STAMPED.match(line))]  # the last one says done; then Python ends
    widest, at = max((b - a, a) for a, b in zip(times, times[1:]))
    assert widest <= 2.5 * EVERY, f"silent for {widest:.1f} s after {at:.1f} s:\n{watched.text()}"


@pytest.mark.parametrize("stage", STAGES)
def test_its_log_is_clean(flow, stage):
    text = flow[stage].log.read_text()
    for line in text.split("\n"):
        assert (line.isprintable() or not line) and len(line) <= 200, line
    for line in spoken(text):
        assert STAMPED.match(line), line
    assert "stalled" not in text and spoken(text)[-1].split()[2] == "done:"


@pytest.mark.parametrize("stage", STAGES)
def test_totals_and_etas_are_there_and_right(flow, stage):
    watched = flow[stage]
    counting = [line for _, line in watched.lines if re.search(r" \d+/\d+  \d+\.\d%", line)]
    assert counting and any("100.0%" in line for line in counting)
    promised = etas(watched)
    assert promised or stage == "02_prepare", watched.text()  # which counts for less than a line's time here
    unseen = unforeseen(watched) if stage == "05_eval" else 0.0
    for left, eta, over, line in promised:
        if left < watched.took / 2:
            allowed = max(0.2 * left, 10)
            assert -allowed - (unseen if over else 0) <= eta - left <= allowed, f"{left:.0f} s were left:\n{line}\n{watched.text()}"


def unforeseen(watched):
    """Seconds of 05 that nothing has foretold without a history: its last phases, and a second server that starts or
    answers later than the first.  What is said is `eta over …` then."""
    starts = [(t, line.split(maxsplit=2)[2]) for t, line in watched.lines if STAMPED.match(line)]
    begun = {name: next(t for t, line in starts if line.startswith(name)) for name in
             ("starting SGLang with the", "answering with the", "stopping", "starting SGLang without", "answering without", "loading the target")}
    a, b, c, d, e, f = begun.values()
    return max(0, (e - d) - (b - a)) + max(0, (f - e) - (d - b)) + watched.lines[-1][0] - f


# --- history, and libraries that talk --------------------------------------------------------------------------------------

def plant(folder, module, body):
    """The environment of a process in which `body` runs once `module`, of a third party, has been imported; in it, module
    is the module, and hold() waits until the test has made the file that is returned too."""
    folder.mkdir()
    release = folder / "release"
    body = "\n".join("    " + line for line in body.strip("\n").split("\n"))
    (folder / "sitecustomize.py").write_text(f"""
import importlib.util, itertools, os, sys, time
calls = itertools.count(1)

def hold():
    while not os.path.exists({str(release)!r}):
        time.sleep(0.05)

def planted(module):
{body}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), planted(module))
            return spec

sys.meta_path.insert(0, Finder())
""")
    return {"PYTHONPATH": str(folder)}, release


TALKATIVE = r"""
import logging, warnings
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, force=True)
logging.getLogger("planted").warning("logging set up anew")
print("\x1b[31mprinted\x1b[0m\rhalf a line", end="")
os.write(1, b"from C to 1\n"), os.write(2, b"from C to 2\n")
warnings.warn("planted warning")
module.logging.getLogger("speculators").info("heard without a handler")
"""


def test_history_foretells_the_end_from_the_first_phase_on_and_libraries_stay_out_of_the_log(flow, place, prepared, tiny, tmp_path):
    environment, _ = plant(tmp_path / "plant", "speculators.train.data", TALKATIVE)
    out = place / "runs/t/base/other/04_train"
    watched = run("04_train", training(prepared, tiny, out, epochs=20), tmp_path / "log", **environment)
    assert watched.wait() == 0, watched.text()
    moving = [line for _, line in watched.lines if re.search(r"\(\d+s\)|  \d+\.\d%", line) and "100.0%" not in line]
    assert ETA.search(watched.lines[0][1]) and all(ETA.search(line) for line in moving), watched.text()
    assert not any(over for _, _, over, _ in etas(watched)), watched.text()
    then, now = (json.loads((place / f"runs/t/base/{name}/04_train/done.json").read_text())["seconds"] for name in ("base", "other"))
    for left, eta, _, line in etas(watched):
        if left < watched.took / 2:  # history speaks of the machine as it was then; what else runs may have changed
            error = min(abs(eta - left), abs(eta * now / then - left))
            assert error <= max(0.2 * left, 10), f"{left:.0f} s were left:\n{line}\n{watched.text()}"
    text = watched.log.read_text()
    libraries = (out / "libraries.log").read_text()
    for said in ("logging set up anew", "printed", "from C to 1", "from C to 2", "planted warning", "heard without a handler"):
        assert said in libraries and said not in text, said
    assert all(STAMPED.match(line) and line.isprintable() for line in spoken(text)), text
    assert (flow["04_train"].log.parent / "runs/t/base/base/04_train/libraries.log").stat().st_size  # of any run


def test_a_stage_too_short_for_a_rate_knows_its_end_by_history(flow, place, tiny, tmp_path):
    watched = run("02_prepare", ["--answers", place / "answers", "--model", tiny, "--out", place / "runs/t/other/02_prepare"], tmp_path / "log")
    assert watched.wait() == 0, watched.text()
    assert all(ETA.search(line) for _, line in watched.lines if "loading libraries" in line), watched.text()
    for left, eta, _, line in etas(watched):  # also in the first half: more than its first phase is foretold
        assert abs(eta - left) <= max(0.2 * left, 10), watched.text()


# --- faults told apart -----------------------------------------------------------------------------------------------------

SLEEPING_LOADER = """
get = module.BaseDataset.__getitem__
def sleeping(self, index):
    if next(calls) == 40:
        hold()
    return get(self, index)
module.BaseDataset.__getitem__ = sleeping
"""


def record(out):
    return json.loads((out / "progress.json").read_text())


def becomes(out, state, within=60):
    """progress.json says so in time; returns it."""
    end = time.monotonic() + within
    while (found := record(out))["state"] != state:
        assert time.monotonic() < end, found
        time.sleep(0.1)
    return found


def status(out):
    """What `make status` says of a stage directory."""
    return next(s for s in json.loads(script("status", out.parent, "--json"))["stages"] if s["stage"] == out.name)


def test_a_loader_that_sleeps_is_named_and_the_job_goes_on(prepared, tiny, tmp_path):
    environment, release = plant(tmp_path / "plant", "speculators.train.data", SLEEPING_LOADER)
    out = tmp_path / "04_train"
    watched = run("04_train", training(prepared, tiny, out), tmp_path / "log", STALL_AFTER=2, WORKERS=0, **environment)
    assert re.search(r"stalled: no step for \d+s \(usually .* s\); waits for loader: \w+ \(.*\.py:\d+\)", watched.until("stalled:", "loader"))
    assert becomes(out, "stalled")["waits"].startswith("loader")
    found = status(out)
    assert found["state"] == "stalled" and found["phase"] == "training"
    os.kill(watched.process.pid, signal.SIGHUP)  # nohup's ignored HUP stays ignored
    time.sleep(2)                                # and without STALL_EXIT no stall ends a job
    assert watched.code is None
    release.touch()
    watched.until("moving again after")
    assert watched.wait() == 0, watched.text()
    assert watched.log.read_text().count("stalled: ") == 1
    assert "stacks at" in (out / "libraries.log").read_text() and "in sleeping" in (out / "libraries.log").read_text()


def test_killed_in_a_stall_it_is_told_to_have_died_leaves_nothing_and_goes_on(prepared, tiny, tmp_path):
    environment, release = plant(tmp_path / "plant", "speculators.train.data", SLEEPING_LOADER)
    out = tmp_path / "04_train"
    flags = training(prepared, tiny, out)
    watched = run("04_train", flags, tmp_path / "log", STALL_AFTER=2, WORKERS=1, **environment)
    watched.until("stalled: no step", "waits for loader")
    workers = watched.family()
    assert workers
    watched.process.kill()
    watched.wait()
    assert status(out)["state"] == "died"
    assert gone(workers), workers  # the loader's worker sleeps on
    assert "done: 30 rows in" in script("04_train", *flags)


def test_stall_exit_ends_the_job_with_its_cause_and_all_its_processes(prepared, tiny, tmp_path):
    environment, _ = plant(tmp_path / "plant", "speculators.train.data", SLEEPING_LOADER)
    out = tmp_path / "04_train"
    watched = run("04_train", training(prepared, tiny, out), tmp_path / "log", STALL_AFTER=2, STALL_EXIT=0.1, WORKERS=1, **environment)
    watched.until("stalled: no step")
    workers = watched.family()
    assert watched.wait() == 1, watched.text()
    assert "giving up, as STALL_EXIT says; waits for loader" in watched.log.read_text()
    found = status(out)
    assert (found["state"], found["exit"]) == ("failed", 1) and found["cause"].startswith("stalled: loader")
    assert gone(workers), workers


def test_what_is_slow_or_known_to_be_quiet_raises_no_alarm(prepared, tiny, tmp_path):
    environment, _ = plant(tmp_path / "plant", "speculators.train.data", """
import torch
get, step, asleep = module.BaseDataset.__getitem__, torch.optim.AdamW.step, []
def sleeping(self, index):
    if not asleep:
        asleep.append(time.sleep(8))
    return get(self, index)
def slow(self, *args, **more):
    if next(calls) > 30:
        time.sleep(0.8)
    return step(self, *args, **more)
module.BaseDataset.__getitem__, torch.optim.AdamW.step = sleeping, slow
""")
    watched = run("04_train", training(prepared, tiny, tmp_path / "04_train"), tmp_path / "log", STALL_AFTER=4, **environment)
    assert watched.wait() == 0, watched.text()
    assert "loading the first batch (" in watched.log.read_text() and "stalled" not in watched.log.read_text(), watched.text()
    quiet = [float(t) for t, line in watched.lines if "loading" in line]
    assert max(quiet) - min(quiet) > 4  # there were longer silences than a stall's


def test_a_server_that_stops_answering_is_named_and_history_foretold_its_start(flow, place, tiny, tmp_path):
    out = place / "runs/t/other/01_generate"
    watched = run("01_generate", generating(place / "questions.jsonl", tiny, out), tmp_path / "log", STALL_AFTER=3)
    watched.until("answering: ")
    end = time.monotonic() + 120
    while not (out / "rows.jsonl").exists() or not (out / "rows.jsonl").stat().st_size:
        assert time.monotonic() < end and watched.code is None, watched.text()
        time.sleep(0.02)
    servers = watched.family()
    for process in servers:
        process.suspend()
    try:
        assert "no row" in watched.until("stalled: ", "waits for server")
        assert becomes(out, "stalled")["waits"].startswith("server")
    finally:
        for process in servers:
            process.resume()
    watched.until("moving again after")
    assert watched.wait() == 0, watched.text()
    starting = [line for _, line in watched.lines if "starting SGLang" in line]
    assert starting and all(ETA.search(line) for line in starting), watched.text()
    assert gone(servers)


# --- several ranks ---------------------------------------------------------------------------------------------------------

RANK_SLEEPS = """
step = module.AdamW.step
def sleeping(self, *args, **more):
    if os.environ.get("RANK") == "1" and next(calls) == 12:
        hold()
    return step(self, *args, **more)
module.AdamW.step = sleeping
"""


def test_the_rank_that_is_waited_for_and_the_rank_that_died_are_named(prepared, tiny, tmp_path):
    environment, release = plant(tmp_path / "plant", "torch.optim.adamw", RANK_SLEEPS)
    out = tmp_path / "04_train"
    watched = run("04_train", training(prepared, tiny, out, epochs=200), tmp_path / "log", STALL_AFTER=8, NPROC=2, **environment)
    line = watched.until("stalled: no step", "collective")
    assert re.search(r"waits for collective: rank 1 is elsewhere, in code hold \(sitecustomize\.py:\d+\)", line), line
    release.touch()
    watched.until("moving again after")
    ranks = watched.family()
    second = next(p for p in ranks if p.environ().get("RANK") == "1" and p.name().startswith("python"))
    second.kill()
    assert watched.wait() == 1, watched.text()
    assert watched.until("failed: rank 1 failed first (SIGKILL)")
    found = status(out)
    assert (found["state"], found["exit"], found["cause"]) == ("failed", 1, "rank 1 failed first (SIGKILL)")
    assert gone(ranks), ranks
    assert all(STAMPED.match(line) for line in spoken(watched.log.read_text())), watched.text()


def test_what_the_ranks_refuse_ends_with_their_sentence_and_code(prepared, tiny, tmp_path):
    out = tmp_path / "04_train"
    flags = [*training(prepared, tiny, out), "--batch-tokens", 64]
    watched = run("04_train", flags, tmp_path / "log", NPROC=2)
    assert watched.wait() == 2, watched.text()
    assert watched.until("refused: --batch-tokens 64 is less than a pack of 128 tokens")
    assert status(out)["state"] == "refused"


def test_stopped_in_a_slow_checkpoint_the_ranks_leave_it_whole_and_nothing_else(prepared, tiny, tmp_path):
    import checkpoint

    environment, _ = plant(tmp_path / "plant", "torch.distributed.checkpoint", """
save = module.save
def slow(*args, **more):
    time.sleep(3)
    return save(*args, **more)
module.save = slow
""")
    out = tmp_path / "04_train"
    watched = run("04_train", training(prepared, tiny, out, epochs=200), tmp_path / "log", NPROC=2, **environment)
    watched.until("held out after step")
    ranks = watched.family()
    os.kill(record(out)["pid"], signal.SIGTERM)
    assert watched.wait() == 143, watched.text()
    watched.until("TERM: stopping at the next safe point"), watched.until("the same command goes on from here")
    assert status(out)["state"] == "stopped"
    assert gone(ranks), ranks
    newest, saved = checkpoint.newest(out / "checkpoints")
    assert newest == max((out / "checkpoints").iterdir())
    steps = [line for _, line in watched.lines if re.search(r"  step \d+/", line)]
    assert int(re.search(r"step (\d+)/", steps[-1])[1]) == saved["step"]


# --- where the log goes ----------------------------------------------------------------------------------------------------

def test_a_library_that_holds_the_interpreters_lock_has_its_stacks_in_the_log_meanwhile(prepared, tiny, tmp_path):
    environment, _ = plant(tmp_path / "plant", "datasets", """
import ctypes
open(os.path.dirname(__file__) + "/asleep", "w").close()
ctypes.PyDLL(None).sleep(12)
""")
    watched = run("02_prepare", ["--answers", prepared / "01_generate", "--model", tiny, "--out", tmp_path / "02_prepare"],
                  tmp_path / "log", LOG_EVERY=1, **environment)
    end = time.monotonic() + 120
    while not (tmp_path / "plant/asleep").exists():
        assert time.monotonic() < end and watched.code is None, watched.text()
        time.sleep(0.05)
    asleep = time.monotonic() - watched.began
    assert watched.wait() == 0, watched.text()
    stacks = [t for t, line in watched.lines if "sitecustomize.py" in line and "in planted" in line]
    assert stacks and asleep < stacks[0] < asleep + 10, watched.text()  # while it slept, for 12 s
    assert watched.until("Timeout (") and watched.until("most recent call first")


def test_a_log_that_nobody_reads_stops_no_stage(prepared, tiny, tmp_path):
    """Not even where faulthandler has stacks to write into it."""
    environment, _ = plant(tmp_path / "plant", "datasets", "import ctypes\nctypes.PyDLL(None).sleep(5)")
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    os.write(write, b"x" * 4096)
    os.set_blocking(write, True)  # a flag of the pipe's end itself, which the stage shares
    process = subprocess.Popen([sys.executable, ROOT / "scripts/02_prepare.py", "--answers", prepared / "01_generate", "--model", tiny,
                                "--out", tmp_path / "02_prepare"], stdout=write, stderr=write, stdin=subprocess.DEVNULL,
                               env={**os.environ, **environment, "LOG_EVERY": "2"})
    try:
        assert process.wait(300) == 0 and (tmp_path / "02_prepare/done.json").exists()
    finally:
        process.kill()
        os.close(read), os.close(write)


def test_on_a_terminal_a_bar_is_drawn_the_lines_are_whole_and_hanging_up_stops_the_stage(prepared, tiny, tmp_path):
    out, (ours, theirs) = tmp_path / "04_train", pty.openpty()
    process = subprocess.Popen([sys.executable, ROOT / "scripts/04_train.py", *map(str, training(prepared, tiny, out, epochs=500))],
                               stdout=theirs, stderr=theirs, stdin=theirs, start_new_session=True,
                               env={**os.environ, "LOG_EVERY": "3", "OMP_NUM_THREADS": "1"})
    os.close(theirs)
    try:
        seen, end = b"", time.monotonic() + 300
        while seen.count(b"held out after step") < 3:
            assert time.monotonic() < end and process.poll() is None, seen
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGHUP)
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # a terminal that everybody has left
                break
        assert process.wait(60) == 129, seen.decode()[-3000:]
    finally:
        process.kill()
        os.close(ours)
    text = seen.decode()
    assert re.search(r"training: +\d+%\|", text), text
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    stamped = [line for line in lines if STAMPED.match(line)]
    bars = [line for line in spoken("\n".join(lines)) if not STAMPED.match(line)]
    assert len(stamped) > 10 and all(re.match(r"[a-z ]+: +\d+%\|", line) for line in bars), bars  # each bar's last state
    assert "HUP: stopping at the next safe point" in text and "the same command goes on from here" in stamped[-1]
    assert (max((out / "checkpoints").iterdir()) / "complete.json").exists()


# --- what it costs ---------------------------------------------------------------------------------------------------------

def test_reporting_takes_less_than_a_hundredth_of_a_step(tmp_path):
    """In one run of 04 under a profile, which makes Python's own functions, ours, look dearer than torch's: the time in all
    functions of progress.py that training calls, and in Trainer.report with its metrics.jsonl, against that of Trainer.run
    less its checkpoints and validations; and the share of a core that the heartbeat took, with lines and records as often
    as they come by default.  The target is wide enough for a step to take what it takes in the demo, about half a second.
    """
    target = model_maker.make(tmp_path / "wide", hidden=512)
    inputs = model_maker.prepare(target, tmp_path / "inputs", rows=40, longest=200)
    environment, _ = plant(tmp_path / "plant", "threading", "")
    (tmp_path / "plant/sitecustomize.py").write_text(f"""
import threading, time
run = threading.Thread.run
def measured(self):
    began = time.monotonic()
    run(self)
    if self.name == "heartbeat":
        open({str(tmp_path / "heartbeat")!r}, "w").write(str(time.thread_time() / (time.monotonic() - began)))
threading.Thread.run = measured
""")
    out, profile = tmp_path / "04_train", tmp_path / "profile"
    flags = ["--tokens", inputs / "02_prepare", "--states", inputs / "03_extract", "--model", target, "--out", out, "--draft-vocab",
             320, "--epochs", 3, "--batch-tokens", 512]
    subprocess.run([sys.executable, "-m", "cProfile", "-o", profile, *map(str, ["scripts/04_train.py", *flags])], cwd=ROOT, check=True,
                   env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    spent = {}  # {(file, function): seconds, callees included}
    for (file, _, function), (_, _, _, cumulative, _) in pstats.Stats(str(profile)).stats.items():
        spent[os.path.basename(file), function] = cumulative
    training_ = spent["trainer.py", "run"] - spent["trainer.py", "validate"] - spent["trainer.py", "save"]
    reporting = sum(spent["progress.py", f] for f in ("advance", "aside", "phase", "log")) + spent["trainer.py", "report"]
    heartbeat = float((tmp_path / "heartbeat").read_text())
    steps = json.loads((out / "done.json").read_text())["steps"]
    print(f"{steps} steps of {training_ / steps:.3f} s; reporting {reporting / training_:.3%}, heartbeat {heartbeat:.3%}")
    assert reporting / training_ + heartbeat < 0.01
