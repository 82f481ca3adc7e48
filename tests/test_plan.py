"""What a run will take, from earlier runs whose figures are known; and that the plan meets the truth in done.json.

Example
    python -m pytest tests/test_plan.py
"""
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import plan
import psutil
import pytest
import stage
from running import ROOT, make

STAGES = plan.STAGES
SETTINGS = ["TARGET=smollm2-135m", "ANSWER_TOKENS=100", "EPOCHS=4", "EVAL_ROWS=8", "MODEL={model}"]


@pytest.fixture(autouse=True)
def nothing_measured_before(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "PROBES", tmp_path / "probes")
    monkeypatch.delenv("NPROC", raising=False)


@pytest.fixture
def sets():
    """The prompts that a probe wants to be there."""
    make("models/humaneval.jsonl")


@pytest.fixture
def commands(tiny, tmp_path):
    """commands(*words): what make would run, as plan.py reads it."""
    def ask(*words):
        words = [f"RUNS={tmp_path / 'runs'}", "PROMPTS=self:640", *(w.format(model=tiny) for w in SETTINGS), *words]
        return plan.read(make("-n", "all", *words).splitlines())
    return ask


def record(directory, given, model, **fields):
    """A stage directory as a finished run leaves it."""
    directory.mkdir(parents=True)
    paths = {"model", "out", "answers", "tokens", "states", "draft", "eval-prompts"}
    typed = [f"--{k} {v}" for k, v in given.items() if k not in paths]
    defaults = ["--val-share 0.1"] if directory.name == "02_prepare" and "val-share" not in given else []
    (directory / "args").write_text("\n".join([f"<{' '.join(typed)}>", *typed, *defaults, f"model {stage.identity(model)}", ""]))
    (directory / "done.json").write_text(json.dumps({"host": socket.gethostname(), "dropped": {}, **fields}))


@pytest.fixture
def history(commands, tiny):
    """An earlier run of 64 invented prompts, and 36 that were none, in DATA=old: 60 rows, by chance 11 and not 6 of them held out,
    answers of 50 tokens after prompts of 30."""
    given = commands("DATA=old", "PROMPTS=self:64")
    files = {name: Path(flags["out"]) for name, flags in given.items()}
    counted = {"01_generate": ("answering", [40, 64, 1]), "02_prepare": ("tokenizing", [6, 60, 1]),
               "03_extract": ("extracting", [30, 60, 1]), "04_train": ("training", [50, 20, 1]),
               "05_eval": ("answering", [24, 12, 2])}
    more = {"01_generate": {"rows_in": 100, "rows_out": 60, "prompt_tokens": 64 * 30, "completion_tokens": 60 * 50},
            "02_prepare": {"rows_in": 60, "rows_out": 60, "samples": 60, "tokens": 4800, "val_samples": 11},
            "03_extract": {"tokens": 4800, "bytes": 4800 * 520}, "04_train": {"tokens": 4800, "ranks": 1},
            "05_eval": {"rows_in": 12}}
    for name, (phase, spent) in counted.items():
        phases = {"loading libraries": [9, 0, 1], phase: spent}
        record(files[name], given[name], tiny, seconds=10 + spent[0], phases=phases, **more[name])
    return files


def test_what_is_counted_grows_and_the_rest_stays(history, commands):
    found = plan.estimate(commands())
    assert found[STAGES[1]]["tokens"] == 48000 and found[STAGES[2]]["bytes"] == 48000 * (8 * 64 + 8) + 500
    waves = 1 + (640 / 64 - 1) * 50 / 100  # ten waves; but for the first, of answers half as long as the longest
    prompts = 8 + 8                        # of the held-out rows, and of HumanEval
    wanted = [10 + 40 * waves, 10 + 6 * 10, 10 + 30 * 10, 10 + 50 * 10, 10 + 24 * prompts / 12]
    assert [f["seconds"] for f in found.values()] == pytest.approx(wanted)
    assert plan.estimate(commands("PROMPTS=self:64"))[STAGES[4]]["seconds"] == pytest.approx(10 + 24 * (6 + 8) / 12)


def test_nothing_is_guessed(commands):
    found = plan.estimate(commands())
    assert all(f[k] is None for f in found.values() for k in f if k != "by")
    text = plan.show(found)
    assert "first held-out" not in text and text.endswith("all in unknown") and text.count("PROBE=1") == 5


@pytest.mark.parametrize("change, unknown", [
    ("ANSWER_TOKENS=200", STAGES), ("EXTRACT_DTYPE=float16", STAGES[2:3]), ("DRAFT_VOCAB=77", STAGES[3:4]),
    ("EVAL_TOKENS=7", STAGES[4:]), ("EPOCHS=2", STAGES[3:4]), ("VAL_SHARE=0.3", STAGES[1:]),
    ("LR=7e-3", []), ("SEED=3", []), ("NAME=hot", [])])
def test_a_run_with_settings_that_run_at_another_rate_tells_nothing(history, commands, change, unknown):
    found = plan.estimate(commands(change))
    assert [s for s in STAGES if found[s]["seconds"] is None] == list(unknown)


def test_another_machine_model_or_number_of_ranks_tells_nothing(history, commands, tmp_path, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    assert plan.estimate(commands())[STAGES[3]]["seconds"] is None
    monkeypatch.delenv("NPROC")
    done = history[STAGES[1]] / "done.json"
    done.write_text(done.read_text().replace(socket.gethostname(), "elsewhere"))
    assert plan.estimate(commands())[STAGES[1]]["seconds"] is None
    args = history[STAGES[2]] / "args"
    args.write_text(args.read_text().replace("model ", "model f"))
    assert plan.estimate(commands())[STAGES[2]]["seconds"] is None


def test_what_is_known_of_this_run_is_not_estimated(history, commands, tiny):
    given = commands()
    for name, fields in ((STAGES[0], {"rows_in": 501, "rows_out": 500}),
                         (STAGES[1], {"rows_in": 500, "tokens": 77_777})):
        record(Path(given[name]["out"]), given[name], tiny, seconds=1, phases={}, **fields)
    (Path(given[STAGES[1]]["out"]) / "heldout.jsonl").write_text("{}\n" * 3)
    rest = {s: given[s] for s in STAGES[2:]}
    found = plan.estimate(rest)
    assert list(found) == list(STAGES[2:]) and found[STAGES[2]]["bytes"] == 77_777 * 520 + 500
    assert found[STAGES[2]]["seconds"] == pytest.approx(10 + 30 * 77_777 / 4800)
    assert found[STAGES[4]]["seconds"] == pytest.approx(10 + 24 * (3 + 8) / 12)


def test_fp8_takes_half(tiny):
    given = {"model": str(tiny)}
    whole, half = plan.bytes_of(10**6, given), plan.bytes_of(10**6, given | {"dtype": "fp8"})
    assert whole / half == pytest.approx(2, rel=0.05)  # but for ids and scales


def test_dollars_by_prices_given_or_as_the_api_told(history, commands, tiny):
    given = commands("API=http://127.0.0.1:9/v1", "API_MODEL=m", "DATA=paid")
    spent = {"rows_in": 64, "rows_out": 60, "prompt_tokens": 64 * 30, "completion_tokens": 60 * 50}
    directory = history[STAGES[0]].parent.with_name("by-api") / STAGES[0]
    record(directory, given[STAGES[0]] | {"prompts": "self:64"}, tiny, seconds=1, phases={"answering": [1, 64, 1]}, **spent)
    assert plan.estimate(given)[STAGES[0]]["cost"] is None
    priced = given | {STAGES[0]: given[STAGES[0]] | {"prices": "10,20"}}
    assert plan.estimate(priced)[STAGES[0]]["cost"] == pytest.approx((640 * 30 * 10 + 600 * 50 * 20) / 1e6)
    done = directory / "done.json"
    done.write_text(json.dumps(json.loads(done.read_text()) | {"cost": 0.4}))
    assert plan.estimate(given)[STAGES[0]]["cost"] == pytest.approx(4.0)
    assert plan.estimate(priced)[STAGES[0]]["cost"] == pytest.approx((640 * 30 * 10 + 600 * 50 * 20) / 1e6)
    assert "cost" not in plan.estimate(commands())[STAGES[0]]


def test_the_first_result_and_what_is_left(history, commands, monkeypatch):
    given = commands()
    found = plan.estimate(given)
    whole = sum(f["seconds"] for f in found.values())
    text = plan.show(found)
    before = sum(found[s]["seconds"] for s in STAGES[:3])
    assert f"first held-out accuracy in {plan.progress.span(before + found[STAGES[3]]['seconds'] / 4)}  by " in text
    assert text.endswith(f"\nall in {plan.progress.span(whole)}")
    out = Path(given[STAGES[2]]["out"])
    out.mkdir(parents=True)
    (out / "args").write_text("<>\n")
    (out / "progress.json").write_text('{"seconds": 100}')
    (out / "hs_0.safetensors").write_bytes(b"x" * 1_000_000)
    left = plan.estimate(given)[STAGES[2]]
    assert left["seconds"] == found[STAGES[2]]["seconds"] - 100
    assert found[STAGES[2]]["bytes"] - left["bytes"] == pytest.approx(1_000_000, rel=0.01)
    monkeypatch.setenv("REDO", "1")
    assert plan.estimate(given) == found


def test_a_plan_stands_from_the_moment_its_stage_has_begun(history, commands):
    given = commands()
    files = {s: Path(given[s]["out"]).with_name(f"{s}.plan.json") for s in STAGES}
    plan.keep(given, plan.estimate(given))
    first = {s: json.loads(file.read_text()) for s, file in files.items()}
    assert set(first[STAGES[2]]) == {"bytes", "seconds"} and set(first[STAGES[3]]) == {"seconds"}
    Path(given[STAGES[1]]["out"]).mkdir()
    (Path(given[STAGES[1]]["out"]) / "args").touch()
    plan.keep(given, {s: {"seconds": 7.0, "by": None} for s in STAGES})
    assert json.loads(files[STAGES[1]].read_text()) == first[STAGES[1]]
    assert json.loads(files[STAGES[2]].read_text()) == {"seconds": 7.0}


def test_a_finished_stage_compares_plan_and_truth(tmp_path, environment):
    (tmp_path / "03_extract.plan.json").write_text(json.dumps({"seconds": 0.5, "bytes": 1000, "tokens": 5}))
    body = ("import pathlib, stage, time, progress\ndef main():\n    out = pathlib.Path('03_extract'); out.mkdir(exist_ok=True)\n"
            "    (out / 'args').write_text('<>')\n    progress.start(out)\n    time.sleep(1)\n"
            "    stage.finish(out, 10, 10, {}, bytes=990)\nstage.run(main)\n")
    subprocess.run([sys.executable, "-c", body], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    done = json.loads((tmp_path / "03_extract" / "done.json").read_text())
    assert done["of_plan"] == {"seconds": round(done["seconds"] / 0.5, 3), "bytes": 0.99}
    assert f"{done['of_plan']['seconds']:.2f} of the planned seconds" in make("status", f"RUNS={tmp_path}")


def test_a_probe_of_prompts_on_the_hub_is_refused(commands):
    given = commands()
    given[STAGES[0]]["prompts"] = "hf:some/set"
    with pytest.raises(stage.Refused, match="hf:some/set is none"):
        plan.probe(given)


@pytest.mark.slow
def test_a_probe_tells_all_leaves_nothing_and_meets_the_truth(sets, tiny, tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [{"id": f"q{i}", "prompt": f"Say something about {i}, please."} for i in range(48)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tmp").mkdir()
    words = [f"RUNS={tmp_path / 'runs'}", f"MODEL={tiny}", f"PROMPTS={questions}", "TEMPERATURE=1.0", "ANSWER_TOKENS=24",
             "VAL_SHARE=0.2", "DRAFT_VOCAB=256", "EPOCHS=3", "BATCH_TOKENS=512", "EVAL_ROWS=4", "EVAL_TOKENS=8",
             "EVAL_CONCURRENCY=4", "EVAL_ROUNDS=1", "EVAL_DTYPE=float32", "CONCURRENCY=16"]
    began = time.time()
    text = make("plan", "PROBE=1", *words, TMPDIR=str(tmp_path / "tmp"))
    assert "unknown" not in text and text.count("eaglet-probes") == 5, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["questions.jsonl", "tmp"]
    kept = tmp_path / "tmp" / f"eaglet-probes-{os.getuid()}"
    assert {p.name for p in kept.rglob("*") if p.is_file()} == {"args", "done.json"} and kept.stat().st_mode & 0o777 == 0o700
    probed = time.time() - began
    make("all", *words, TMPDIR=str(tmp_path / "tmp"), FORCE="1")
    for name in STAGES:
        done = stage.done(next((tmp_path / "runs").rglob(name)))
        assert set(done["of_plan"]) >= {"seconds"} and 0.1 < done["of_plan"]["seconds"] < 10, (name, done, probed)
        if name == STAGES[2]:
            assert abs(done["of_plan"]["bytes"] - 1) < 0.2
    assert make("plan", *words, TMPDIR=str(tmp_path / "tmp")).strip() == "nothing to do"


@pytest.mark.slow
def test_an_interrupted_probe_ends_all_that_it_started(sets, tiny, tmp_path):
    words = [f"PYTHON={sys.executable}", f"RUNS={tmp_path / 'runs'}", f"MODEL={tiny}", "PROMPTS=self:9"]
    process = subprocess.Popen(["make", "plan", "PROBE=1", *words], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    until = time.time() + 300
    while not list(tmp_path.glob(".probe-*/*/*/01_generate/sglang.log")) and time.time() < until:
        time.sleep(0.1)
    started = psutil.Process(process.pid).children(recursive=True)
    probing, = (p for p in started if p.cmdline()[1:2] == ["scripts/plan.py"])
    assert len(probing.children(recursive=True)) >= 3  # make, the stage, its server
    probing.terminate()
    assert process.wait(120) != 0
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive and not list(tmp_path.glob(".probe-*"))
