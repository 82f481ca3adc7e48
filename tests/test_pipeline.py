"""The whole flow on the tiny target, through make and a real SGLang on the CPU, killed in every stage."""
import json
import random
import shutil
import time
from collections import Counter

import pytest
from running import kill_when, make, script

import walk

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
            "EVAL_ROWS": 4, "EVAL_TOKENS": 24, "EVAL_DTYPE": "float32", "EVAL_CONCURRENCY": "1,4", "EVAL_ROUNDS": 2, "EVAL_SAMPLED": 4, "SWEEP": "2-2-4",
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
             "05_eval": "pass-1-3-1-4.json"}
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
    out = directory(finished, "05_eval")
    results = json.loads((out / "results.json").read_text())
    assert {"acceptance_length", "acceptance_by_position", "tokens_per_s", "tokens_per_s_baseline", "speedup", "identical_outputs",
            "prompts"} <= set(results)
    assert results["identical_outputs"] == 1.0 and results["lossless"]["same"] == results["prompts"]
    assert sum(results["accepted"]) > 20 and results["interval"][0] <= results["acceptance_length"] <= results["interval"][1]
    assert abs(results["walked"]["trained"]["heldout"] - results["within_answers"]) <= 0.03
    assert results["settings"]["loader"] == "every weight has its place"  # the engine's own word
    assert sorted(p.name for p in out.glob("pass-*")) == [f"pass-{k}-{name}.json" for k in (1, 2) for name in ("2-2-4", "3-1-4", "plain")]
    for name, by in results["speeds"].items():
        for speed in by.values():
            assert speed["answered"] == speed["requests"] and speed["ms_per_token"] > 0 and speed["ms_to_first_token"] > 0, name


def test_a_server_that_verifies_greedily_at_temperature_1_is_found_out(finished):
    """SGLang's CPU path does: with a draft it always says the likeliest token, whatever the temperature."""
    drawn = json.loads((directory(finished, "05_eval") / "results.json").read_text())["temperature_1"]
    assert drawn["answers"] == 16 and drawn["nats_with_draft"] > drawn["nats_plain"] and not drawn["same"]
    assert "THE DRAFT CHANGES WHAT IS DRAWN" in (directory(finished, "05_eval") / "report.md").read_text()


def test_the_report_can_be_made_anew_and_names_every_stage(finished):
    out = directory(finished, "05_eval")
    before = {name: (out / name).read_text() for name in ("report.md", "report.html", "card.md")}
    for name in (*before, "report.png"):
        (out / name).unlink()
    make("report", *words(finished))
    assert {name: (out / name).read_text() for name in before} == before
    assert all(stage in before["report.md"] for stage in STAGES[:4]) and before["report.html"].count("data:image/png;base64,") == 3


def test_the_advice_is_the_fastest_when_it_is_tried_again_or_within_noise(finished):
    """Advice by the first round alone; the second is the replay."""
    import measure

    passes = {name: [json.loads((directory(finished, "05_eval") / f"pass-{k}-{name}.json").read_text())["levels"] for k in (1, 2)]
              for name in ("3-1-4", "2-2-4", "plain")}
    rows = [json.loads(line) for line in (directory(finished, "05_eval") / "rows.jsonl").read_text().splitlines()]
    first, again = ({name: {n: measure.speed(rows, [levels[k][n]]) for n in levels[k]} for name, levels in passes.items()} for k in (0, 1))
    for flight, advised in measure.advice(first).items():
        rates = {name: (first[name][flight]["tokens_per_s"], again[name][flight]["tokens_per_s"]) for name in passes}
        noise = max(abs(a - b) / max(a, b) for a, b in rates.values())
        assert rates[advised["setting"] or "plain"][1] >= max(b for _, b in rates.values()) * (1 - max(noise, advised["noise"])), rates


# --- drafts of others ------------------------------------------------------------------------------------------------------

def evaluated(finished, draft, out, *more, dtype="float32"):
    """05's results and the plain target's answers on the same prompts for a draft's own directory."""
    script("05_eval", "--draft", draft, "--model", finished["MODEL"], "--out", out, "--eval-prompts", *more, finished["EVAL_PROMPTS"],
           "--eval-rows", 4, "--eval-tokens", 24, "--eval-dtype", dtype, "--eval-concurrency", 4, "--eval-rounds", 1)
    plain = json.loads((out / "pass-1-plain.json").read_text())["levels"]["4"]["rows"]
    return json.loads((out / "results.json").read_text()), plain


def test_a_draft_that_always_says_the_same_is_accepted_where_the_target_says_it(finished, tmp_path):
    """On a prompt that almost fills the target's window, and makes it repeat itself; and as SpecForge exports, without layers."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    import chat

    question = {"messages": [{"role": "user", "content": "x" * 1900}]}
    ids = chat.render(chat.load_tokenizer(finished["MODEL"]), question["messages"], answer_next=True)
    target = AutoModelForCausalLM.from_pretrained(finished["MODEL"], dtype=torch.float32)
    token = Counter(target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=16)[0, len(ids):].tolist()).most_common(1)[0][0]
    shutil.copytree(directory(finished, "04_train") / "sglang", tmp_path / "draft")
    weights, config = load_file(tmp_path / "draft/model.safetensors"), json.loads((tmp_path / "draft/config.json").read_text())
    weights["norm.weight"].zero_()                                    # all logits are equal: the first proposal wins,
    weights["d2t"] = torch.full_like(weights["d2t"], token) - torch.arange(len(weights["d2t"]))  # and all mean the same token
    save_file(weights, tmp_path / "draft/model.safetensors")
    del config["eagle_config"]
    (tmp_path / "draft/config.json").write_text(json.dumps(config))
    (tmp_path / "long.jsonl").write_text(json.dumps(question) + "\n")
    results, plain = evaluated(finished, tmp_path / "draft", tmp_path / "05_eval", tmp_path / "long.jsonl")
    known = [walk.walk([[token] * (9 + len(row["ids"]))] * 3, [-1] * 9 + row["ids"], 9) for row in plain]
    assert walk.acceptance_length(known[0]) > 2                       # else nothing is shown
    assert results["sets"]["long"]["within_answers"] == pytest.approx(walk.acceptance_length(known[0]), abs=0.03)
    assert results["sets"]["heldout"]["within_answers"] == pytest.approx(walk.acceptance_length(sum(known[1:], Counter())), abs=0.03)
    assert results["identical_outputs"] == 1.0
    config = json.loads((tmp_path / "05_eval/sglang/config.json").read_text())
    contract = json.loads((directory(finished, "04_train") / "contract.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in contract["layer_ids"]]


def test_a_random_draft_in_speculators_layout_is_accepted_as_seldom_as_it_must(finished, tmp_path):
    import trainer

    made = trainer.load_draft(directory(finished, "04_train") / "draft", finished["MODEL"])
    fresh = trainer.build_draft(finished["MODEL"], made.config.eagle_aux_hidden_state_layer_ids, made.d2t, made.t2d, 3)
    fresh.save_pretrained(tmp_path / "draft")
    results, plain = evaluated(finished, tmp_path / "draft", tmp_path / "05_eval", dtype="bfloat16")
    assert results["lossless"]["dtype"] == "float32" and results["lossless"]["same"] == len(plain)  # asked of servers of their own
    known = json.loads((directory(finished, "05_eval") / "results.json").read_text())["walked"]["untrained"]["heldout"]
    assert 1 <= results["acceptance_length"] <= 1.2 and abs(results["acceptance_length"] - known) <= 0.03
    assert all(a["setting"] is None for a in results["advice"].values()), results["advice"]


def test_a_draft_that_the_engine_would_load_wrongly_is_refused_before_any_server_starts(finished, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(directory(finished, "04_train") / "sglang", tmp_path / "draft")
    weights = load_file(tmp_path / "draft/model.safetensors")
    weights["layer0.mlp.up_proj.weight"] = weights.pop("midlayer.mlp.up_proj.weight")
    weights["midlayer.self_attn.q_norm.weight"], weights["norm.weight"] = torch.zeros(16), torch.zeros(63)
    save_file(weights, tmp_path / "draft/model.safetensors")
    said = script("05_eval", "--draft", tmp_path / "draft", "--model", finished["MODEL"], "--out", tmp_path / "05_eval", "--eval-prompts",
                  finished["EVAL_PROMPTS"], code=2)
    for wrong in ("layer0.mlp.up_proj.weight [128, 64] would be dropped", "q_norm.weight [16] would be dropped",
                  "gate_up_proj.weight [256, 64] would stay unfilled", "norm.weight [63] does not fit"):
        assert wrong in said, said
    assert not (tmp_path / "05_eval/sglang.log").exists()


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
