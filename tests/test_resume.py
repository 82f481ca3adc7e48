"""Trainings that are killed, stopped, starved and moved: whatever happens, the same command ends where it would have ended.

Losses and exported weights are compared bit for bit, on the CPU in float32.  KILLS=20 (environment) kills as often.
"""
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from nursery import Nursery
from running import ROOT

pytestmark = pytest.mark.slow
FLAGS = ["--draft-vocab", 200, "--epochs", 3, "--batch-tokens", 512, "--pack-tokens", 128, "--lr", "2e-3"]  # 15 steps of 4 packs


@pytest.fixture(scope="module")
def nursery():
    with Nursery() as made:
        yield made


class Training:
    """One stage directory, trained by processes of the nursery: one, or `ranks` that meet as under torchrun."""

    def __init__(self, nursery, prepared, tiny, out, *flags):
        self.nursery, self.out, self.log, self.children = nursery, out, out.with_name(out.name + ".txt"), []
        self.command = ["scripts/04_train.py", "--tokens", prepared / "02_prepare", "--states", prepared / "03_extract", "--model", tiny,
                        "--out", out, *FLAGS, *flags]

    def start(self, ranks=1, **env):
        if ranks > 1 and not (self.out / "args").exists():             # the process that starts ranks claims the directory
            self.start(1)
            self.wait_for((self.out / "args").exists)
            self.kill()
        self.log.write_text("")
        port = free_port()
        meet = [{} if ranks == 1 else {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                                       "MASTER_PORT": port} for r in range(ranks)]
        self.children = [self.nursery.start(self.command, self.log, **one, **env) for one in meet]
        return self

    def end(self, code=0):
        codes = [child.wait() for child in self.children]
        assert codes == [code] * len(codes), (codes, self.log.read_text())
        return self.log.read_text()

    def kill(self, number=signal.SIGKILL):
        for child in self.children:
            child.kill(number)
        return [child.wait() for child in self.children]

    def wait_for(self, ready):
        end = time.monotonic() + 300
        while not ready() and any(child.poll() is None for child in self.children):
            assert time.monotonic() < end
            time.sleep(0.005)

    def steps(self):
        return [json.loads(line)["step"] for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def numbers(self):
        """What must not depend on interruptions: every logged number but times and speeds, and the exported bytes."""
        logged = [{k: v for k, v in json.loads(line).items() if k not in ("time", "tokens_per_s", "time_in")}
                  for name in ("metrics", "validation") for line in (self.out / f"{name}.jsonl").read_text().splitlines()]
        return logged, (self.out / "sglang" / "model.safetensors").read_bytes()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def training(nursery, prepared, tiny, tmp_path):
    def make(name="04_train", *flags, data=None):
        return Training(nursery, data or prepared, tiny, tmp_path / name, *flags)
    return make


@pytest.fixture(scope="module")
def undisturbed(nursery, prepared, tiny, tmp_path_factory):
    """{ranks: an uninterrupted Training}, as far as they are asked for."""
    made = {}

    def get(ranks=1):
        if ranks not in made:
            made[ranks] = Training(nursery, prepared, tiny, tmp_path_factory.mktemp("undisturbed") / "04_train").start(ranks)
            made[ranks].end()
        return made[ranks]
    return get


# --- killed, stopped --------------------------------------------------------------------------------------------------

def test_two_runs_of_one_command_are_equal(undisturbed, training):
    again = training().start()
    again.end()
    assert again.numbers() == undisturbed().numbers()


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments_it_ends_bit_for_bit_as_undisturbed(undisturbed, training, ranks):
    seed, kills = time.time_ns(), int(os.environ.get("KILLS", 4))
    print("seed", seed)
    draw, run = random.Random(seed), training()
    seen = {"killed": 0, "mid-save": 0, "resumed": 0}

    def begin():
        run.start(ranks, SAVE_EVERY="0", LOG_EVERY="0.5")

    def finished():
        seen["resumed"] += "resuming at step" in run.log.read_text()
        if not (run.out / "done.json").exists():
            return False
        assert run.numbers() == undisturbed(ranks).numbers()
        shutil.rmtree(run.out)                                         # and the next kills hit another run
        return True

    while seen["killed"] < kills:
        begin()
        if seen["killed"] % 2:                                         # in the middle of writing a checkpoint
            run.wait_for(lambda: (run.out / ".saving").exists() or (run.out / "checkpoints" / ".saving").exists())
            time.sleep(draw.random() * 0.05)
        else:
            time.sleep(draw.random() * 6)
        seen["mid-save"] += (run.out / "checkpoints" / ".saving").exists()
        codes = run.kill()
        seen["killed"] += -signal.SIGKILL in codes
        finished()
    begin()
    run.end()
    assert run.out.exists() and finished()
    print(seen)
    assert seen["resumed"] > 0


def test_every_other_recipe_resumes_exactly_too(training, prepared):
    recipe = ["--optimizer", "muon", "--lm-head", "trained", "--draft-layers", 2, "--norms", 3, "--out-of-vocab", "mask", "--loss", "lk_hybrid",
              "--ttt-decay", 0.8, "--schedule", "cosine", "--warmup-ratio", 0.2, "--draft-vocab", 50, "--train-rows", 20, "--epochs", 2]
    whole, run = training("whole", *recipe), training("run", *recipe)
    whole.start().end()
    run.start(SAVE_EVERY="0")
    run.wait_for(lambda: any(p.parent.name > "step-000000002" for p in (run.out / "checkpoints").glob("step-*/complete.json")))
    run.kill()
    assert "resuming at step" in run.start().end()
    assert run.numbers() == whole.numbers()
    rows = json.loads((prepared / "02_prepare" / "done.json").read_text())["train_samples"]
    assert json.loads((run.out / "done.json").read_text())["dropped"] == {"beyond --train-rows": rows - 20}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_it_saves_says_how_it_ended_and_goes_on(undisturbed, training, ranks, number):
    run = training().start(ranks, LOG_EVERY="0.2")
    run.wait_for(lambda: "held out after step 5" in run.log.read_text())
    run.kill(number)
    assert {child.wait() for child in run.children} == {128 + number}, run.log.read_text()
    assert "the same command goes on from here" in run.log.read_text()
    output = run.start(ranks).end()
    step = int(re.search(r"resuming at step (\d+)", output)[1])
    assert 5 <= step < 15
    assert run.numbers() == undisturbed(ranks).numbers()


def test_a_rank_that_is_killed_ends_the_run_which_then_goes_on(undisturbed, training, prepared):
    """Under the project's own torchrun."""
    run = training()
    environment = {**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1", "SAVE_EVERY": "0"}
    process = subprocess.Popen([sys.executable, *map(str, run.command)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, env=environment)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "held out after step" in line:
            ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if p.environ().get("RANK") == "1"]
            min(ranks, key=lambda p: p.create_time()).kill()
            break
    lines += process.communicate(timeout=300)[0]
    assert process.returncode == 1, "".join(lines)
    assert "rank 1 failed first (SIGKILL)" in "".join(lines)
    assert "resuming at step" in run.start(2).end()
    assert run.numbers() == undisturbed(2).numbers()


# --- other numbers of ranks -------------------------------------------------------------------------------------------

def close(one, two, tolerance=1e-3):
    """Equal steps, and losses within rounding."""
    for a, b in zip(one.numbers()[0], two.numbers()[0], strict=True):
        assert a["step"] == b["step"] and a["lr" if "lr" in a else "ceiling"] == b["lr" if "lr" in b else "ceiling"]
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)


def test_two_ranks_train_the_same_steps_as_one(undisturbed):
    close(undisturbed(1), undisturbed(2))


def test_a_training_of_two_ranks_goes_on_with_one_and_with_two_again(undisturbed, training):
    run, before = training(), 0
    for ranks, until in ((2, 5), (1, 8), (2, 15)):                     # two ranks save at the ends of epochs: 5, 10, 15
        run.start(ranks, SAVE_EVERY="0")
        run.wait_for(lambda: any(int(p.parent.name[5:]) >= until for p in (run.out / "checkpoints").glob("step-*/complete.json")))
        if until < 15:
            run.kill()
        else:
            run.end()
        assert before == 0 or int(re.search(r"resuming at step (\d+)", run.log.read_text())[1]) in (before, before + 1)
        before = until
    close(undisturbed(1), run)


def test_ranks_without_a_pack_are_told_and_change_nothing(training):
    one, two = (training(name, "--pack-tokens", 512, "--epochs", 2) for name in ("one", "two"))
    assert "nothing to do" not in one.start().end()
    assert "a step is 1 packs of 512 tokens, so 1 of 2 ranks have nothing to do" in two.start(2).end()
    close(one, two)


def test_ranks_that_run_several_packs_at_a_time_train_the_same_steps(undisturbed, training):
    for ranks, at_once in ((1, 4), (2, 2)):
        run = training(f"at-once-{ranks}")
        assert f"a rank runs {at_once} of a step's 4 packs of 128 tokens at a time" in run.start(ranks, MICRO_TOKENS="512").end()
        close(undisturbed(1), run)


def test_a_rank_runs_fewer_packs_at_a_time_where_its_memory_is_short(undisturbed, training):
    """30,000 tokens at a time want 14 GB for the scores of one TTT step alone; the process gets 2 GB on top of its libraries."""
    few, many = (training(name, "--batch-tokens", 30_000, "--epochs", 1) for name in ("few", "many"))
    few.start().end()
    many.start(MICRO_TOKENS="30000")
    process = psutil.Process(many.children[0].pid)
    most = process.memory_info().vms + (2 << 30)
    process.rlimit(psutil.RLIMIT_AS, (most, most))
    output = many.end()
    assert "packs at a time are too many for the memory of a rank" in output
    close(few, many)


def test_sharded_ranks_train_the_same_steps_and_export_the_same_draft(undisturbed, training):
    from safetensors.torch import load_file

    run = training().start(2, SHARD="1")
    assert "2 rank(s) on cpu, sharded" in run.end()
    close(undisturbed(1), run)
    one, two = (load_file(out / "sglang" / "model.safetensors") for out in (undisturbed(1).out, run.out))
    assert one.keys() == two.keys() and all((one[k].float() - two[k].float()).abs().max() < 0.02 for k in one)
    for log in run.out.glob("*.log"):
        assert "rng" not in log.read_text().lower(), log               # DTensor's warning about unseeded generators


def test_a_sharded_training_goes_on_unsharded(undisturbed, training):
    run = training().start(2, SHARD="1")
    run.wait_for(lambda: (run.out / "checkpoints" / "step-000000005" / "complete.json").exists())
    run.kill()
    output = run.start(1).end()
    assert "resuming at step" in output
    close(undisturbed(1), run)


def test_two_agents_of_two_machines_train_as_one_process(undisturbed, training):
    """Here both on one machine, over loopback; the second neither claims the directory nor speaks."""
    run = training()
    environment = {**os.environ, "NNODES": "2", "NPROC": "1", "RDZV": f"127.0.0.1:{free_port()}", "OMP_NUM_THREADS": "1"}
    nodes = [subprocess.Popen([sys.executable, *map(str, run.command)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env={**environment, "NODE_RANK": str(node)}) for node in (1, 0)][::-1]
    try:
        said = [node.communicate(timeout=400)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "2 rank(s)" in said[0] and "done: 30 rows in, 30 out" in said[0] and "step " not in said[1]
    close(undisturbed(1), run)


# --- checkpoints ------------------------------------------------------------------------------------------------------

def checkpoints(run):
    return sorted(p.name for p in (run.out / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("fault", ["no mark", "a file cut off", "a file gone", "a torn mark"])
def test_a_checkpoint_that_is_not_complete_is_named_and_the_one_before_is_taken(undisturbed, training, fault):
    run = training().start(SAVE_EVERY="0")
    run.wait_for(lambda: any(name > "step-000000006" for name in checkpoints(run)))
    run.kill()
    names = checkpoints(run)
    newest = run.out / "checkpoints" / names[-1]
    mark, part = newest / "complete.json", next(iter(newest.glob("*.distcp")))
    {"no mark": lambda: mark.unlink(missing_ok=True), "a torn mark": lambda: mark.write_text('{"step": '),
     "a file gone": part.unlink, "a file cut off": lambda: os.truncate(part, part.stat().st_size - 1)}[fault]()
    output = run.start().end()
    assert f"checkpoint {names[-1]} is not complete: skipped" in output
    assert f"resuming at step {int(names[-2].removeprefix('step-'))}" in output
    assert run.numbers() == undisturbed().numbers()


def test_the_newest_two_and_the_best_are_kept_and_the_best_is_exported(undisturbed):
    run = undisturbed()
    done = json.loads((run.out / "done.json").read_text())
    validations = [json.loads(line) for line in (run.out / "validation.jsonl").read_text().splitlines()]
    best = max(validations, key=lambda row: row["acceptance"])
    assert done["best"] == {"step": best["step"], "acceptance": best["acceptance"]}
    assert set(checkpoints(run)) == {f"step-{step:09d}" for step in {10, 15, best["step"]}}
    assert f"exporting the draft of step {best['step']}" in run.log.read_text()


def test_a_disk_that_cannot_take_a_checkpoint_is_found_out_before_the_first_step(training):
    run = training()
    run.start()
    run.wait_for((run.out / "args").exists)
    run.kill()
    (run.out / "checkpoints").write_text("in the way")
    output = run.start().end(code=1)
    assert "failed: " in output and "training: " not in output


# --- bad samples, bad luck --------------------------------------------------------------------------------------------

@pytest.fixture
def spoiled(prepared, tmp_path):
    """A copy of the rows with one file cut off and one NaN."""
    from safetensors.torch import load_file, save_file

    root = tmp_path / "spoiled"
    shutil.copytree(prepared, root)
    path = root / "03_extract/hs_4.safetensors"
    os.truncate(path, path.stat().st_size - 7)
    path = root / "03_extract/hs_9.safetensors"
    held = load_file(path)
    held["hidden_states"][5, 2, 7] = float("nan")
    save_file(held, path)
    return root


@pytest.mark.parametrize("ranks", [1, 2])
def test_broken_samples_are_named_and_counted_and_training_goes_on(training, spoiled, ranks):
    run = training("04_train", "--max-broken", 0.1, data=spoiled).start(ranks)
    output = run.end()
    assert "hs_4.safetensors is missing, cut off" in output and "hs_9.safetensors holds values that are not finite" in output
    assert {json.loads(line)["row"] for line in (run.out / "quarantine.jsonl").read_text().splitlines()} == {4, 9}
    done = json.loads((run.out / "done.json").read_text())
    assert (done["rows_out"], done["dropped"], done["skipped_steps"]) == (28, {"broken states": 2}, 0)
    assert all(json.loads(line)["loss"] < 20 for line in (run.out / "metrics.jsonl").read_text().splitlines())


def test_too_many_broken_samples_stop_the_run(training, spoiled):
    output = training(data=spoiled).start().end(code=2)
    assert "1 of 30 rows have broken states, more than --max-broken 0.01: hs_4.safetensors" in output


def test_a_learning_rate_that_explodes_stops_the_run_with_the_samples(training):
    run = training("04_train", "--lr", "1e30", "--clip-norm", "1e30").start()
    output = run.end(code=2)
    assert "steps in a row are not finite" in output and re.search(r"look at their rows: r\d+", output)


def test_running_out_of_memory_says_what_to_lower(training):
    run = training("04_train", "--batch-tokens", 3_000_000, "--pack-tokens", 3_000_000).start()
    output = run.end(code=2)
    assert "out of memory at step 0: lower MICRO_TOKENS" in output and "Traceback" not in output


def test_shared_memory_that_is_too_small_is_told_and_the_loader_goes_without_workers(training, prepared):
    run = training()
    shell = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"', "bash", sys.executable]
    if subprocess.run([*shell, "-c", ""], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    done = subprocess.run([*shell, *map(str, run.command)], cwd=ROOT, text=True, capture_output=True, timeout=600,
                          env={**os.environ, "WORKERS": "4", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    assert "/dev/shm has room for 0 of 4 loader workers" in done.stdout


def test_an_unknown_logger_is_refused_and_an_absent_one_named(training):
    assert "LOGGER=nothing: there are tensorboard" in training("a").start(LOGGER="nothing").end(code=2)
    assert "LOGGER=wandb: " in training("b").start(LOGGER="wandb").end(code=2)
