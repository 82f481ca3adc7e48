"""The whole flow on the tiny target, through make and a real SGLang on the CPU, killed in every stage."""
import json
import random
import shutil
import time

import pytest
from running import kill_when, make

pytestmark = pytest.mark.slow
STAGES = ["01_generate", "02_prepare", "03_extract", "04_train", "05_eval"]


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    """Make variables of a small run on the tiny target."""
    root = tmp_path_factory.mktemp("pipeline")
    questions = root / "questions.jsonl"
    questions.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"Say something about {i}, please."}) + "\n" for i in range(24)))
    return {"RUNS": root / "runs", "MODEL": tiny, "PROMPTS": questions, "TEMPERATURE": "1.0", "ANSWER_TOKENS": 48, "VAL_SHARE": 0.2,
            "EXTRACT_DTYPE": "float32", "GENERATE_DTYPE": "float32", "DRAFT_VOCAB": 256, "EPOCHS": 3, "BATCH_TOKENS": 512,
            "EVAL_ROWS": 4, "EVAL_TOKENS": 24, "EVAL_DTYPE": "float32", "EVAL_CONCURRENCY": 4,
            "EVAL_PROMPTS": root / "runs/smollm2-135m/base/02_prepare/heldout.jsonl"}


def words(settings):
    return [f"{k}={v}" for k, v in settings.items()]


def directory(settings, stage):
    base = settings["RUNS"] / "smollm2-135m" / "base"
    return base / stage if stage < "04" else base / "base" / stage


@pytest.fixture(scope="module")
def finished(settings):
    """A finished tree whose every stage was killed once, at a random moment after it had begun to produce."""
    seed = time.time_ns()
    print("seed", seed)
    draw = random.Random(seed)
    begun = {"01_generate": "rows.jsonl", "02_prepare": "args", "03_extract": "hs_*.safetensors", "04_train": "checkpoints/step*",
             "05_eval": "plain.json"}
    for stage in STAGES:
        out, goal = directory(settings, stage), stage[3:]
        planned = next(line for line in make("-n", goal, *words(settings)).splitlines() if f"scripts/{stage}" in line)
        command = planned.split()[1:]
        output, running = kill_when(command, lambda: any(p.stat().st_size for p in out.glob(begun[stage])),
                                    delay=draw.random() * 1.5, SAVE_EVERY="0")
        assert not running or not (out / "done.json").exists() or stage == "02_prepare", output
        print(stage, "killed" if running else "had ended")
        make(goal, *words(settings))
        assert (out / "done.json").exists()
    return settings


def test_every_stage_survives_a_kill_and_accounts_for_every_row(finished):
    done = {stage: json.loads((directory(finished, stage) / "done.json").read_text()) for stage in STAGES}
    for stage, record in done.items():
        assert record["rows_in"] == record["rows_out"] + sum(record["dropped"].values()), stage
        assert {"seconds", "commit"} <= set(record)
    assert done["01_generate"]["rows_in"] == 24
    assert done["02_prepare"]["rows_in"] == done["01_generate"]["rows_out"]
    assert done["03_extract"]["rows_in"] == done["02_prepare"]["samples"]


def test_every_prompt_is_answered_once(finished):
    rows = [json.loads(line) for name in ("rows", "rejected")
            for line in (directory(finished, "01_generate") / f"{name}.jsonl").read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == sorted(f"q{i}" for i in range(24))


def test_prompt_ids_are_those_of_the_chat_template(finished):
    import chat

    tokenizer = chat.load_tokenizer(finished["MODEL"])
    for line in (directory(finished, "01_generate") / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["prompt_ids"] == chat.render(tokenizer, row["messages"][:-1], answer_next=True)
        assert len(row["answer_ids"]) == row["usage"]["completion_tokens"]


def test_every_extracted_state_is_that_of_transformers(finished):
    import torch
    from datasets import load_from_disk

    import states

    layers = json.loads((directory(finished, "03_extract") / "contract.json").read_text())["layer_ids"]
    target = states.reference(finished["MODEL"], torch.float32)
    rows = load_from_disk(directory(finished, "02_prepare") / "dataset").with_format(None)
    for i, row in enumerate(rows):
        ids = row["input_ids"]
        found = states.check(states.file_of(directory(finished, "03_extract"), i), ids, 64)["hidden_states"]
        wanted = target(ids, layers)
        assert states.token_errors(found, wanted).max() < 0.004  # bf16 storage alone: 0.0029 at most
        assert states.token_errors(found, wanted.roll(1, 1)).median() > 0.05  # another layer's states would be seen


def test_the_server_loads_the_draft_and_counts_its_proposals(finished):
    results = json.loads((directory(finished, "05_eval") / "results.json").read_text())
    assert {"acceptance_length", "acceptance_by_position", "tokens_per_s", "tokens_per_s_baseline", "speedup", "identical_outputs",
            "prompts"} <= set(results)
    assert results["identical_outputs"] == 1.0
    assert sum(results["accepted"]) > 20
    assert abs(results["walked"]["trained"]["heldout"] - results["acceptance_length"]) <= 0.05
    assert (directory(finished, "05_eval") / "acceptance.png").stat().st_size > 5000


def test_a_finished_tree_has_nothing_to_do_wherever_it_is(finished, tmp_path):
    assert make("plan", *words(finished)).strip() == "nothing to do"
    moved = tmp_path / "moved"
    shutil.move(finished["RUNS"], moved)
    there = {**finished, "RUNS": moved, "EVAL_PROMPTS": moved / "smollm2-135m/base/02_prepare/heldout.jsonl"}
    assert make("plan", *words(there)).strip() == "nothing to do"
    assert make("status", *words(there)).count(" done ") == 5
    for directory_ in (p for p in moved.glob("**/*") if p.suffix in (".json", ".jsonl", ".md") or p.name == "args"):
        assert str(finished["RUNS"]) not in directory_.read_text(), directory_
    shutil.move(moved, finished["RUNS"])
