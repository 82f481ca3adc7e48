"""On a real language model: parity of the states, and one row overfitted to full served acceptance."""
import json

import pytest
from running import ROOT, script

pytestmark = pytest.mark.slow
MODEL = ROOT / "models" / "smollm2-135m"
QUESTIONS = ["Why is the sky blue?", "Write two sentences about the sea.", "Name three fruits and their colours.", "Count from one to twenty."]


@pytest.fixture(scope="module")
def extracted(tmp_path_factory):
    """Four greedy answers, exact as a float32 server's later ones will be; their states in bfloat16, as on a GPU."""
    root = tmp_path_factory.mktemp("smollm2")
    (root / "questions.jsonl").write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    script("01_generate", "--prompts", root / "questions.jsonl", "--model", MODEL, "--out", root / "01_generate",
           "--temperature", 0, "--answer-tokens", 48, "--generate-dtype", "float32")
    script("02_prepare", "--answers", root / "01_generate", "--model", MODEL, "--out", root / "02_prepare", "--val-share", 0)
    script("03_extract", "--tokens", root / "02_prepare", "--model", MODEL, "--out", root / "03_extract")
    return root


def test_states_through_sglang_are_as_exact_as_those_of_transformers_in_the_same_precision(extracted):
    parity = json.loads((extracted / "03_extract" / "parity.json").read_text())
    assert parity["top1_agreement"] >= 0.95
    for slot, error in parity["transformers"].items():
        assert 0 < error["median"] <= 1.2 * error["transformers_median"], (slot, error)


def test_one_row_overfitted_is_accepted_in_full_by_the_server(extracted, tmp_path):
    rows = [json.loads(line) for line in (extracted / "01_generate" / "rows.jsonl").read_text().splitlines()]
    row = max(rows, key=lambda r: len(r["answer_ids"]))
    answers = tmp_path / "01_generate"
    answers.mkdir()
    (answers / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (answers / "done.json").write_text("{}")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"id": row["id"], "messages": row["messages"][:-1]}) + "\n")
    script("02_prepare", "--answers", answers, "--model", MODEL, "--out", tmp_path / "02", "--val-share", 0)
    script("03_extract", "--tokens", tmp_path / "02", "--model", MODEL, "--out", tmp_path / "03", "--extract-dtype", "float32")
    script("04_train", "--tokens", tmp_path / "02", "--states", tmp_path / "03", "--model", MODEL, "--out", tmp_path / "04",
           "--draft-vocab", 512, "--epochs", 90, "--batch-tokens", 96, "--lr", "2e-3")
    script("05_eval", "--draft", tmp_path / "04", "--model", MODEL, "--eval-prompts", tmp_path / "eval.jsonl", "--out",
           tmp_path / "05", "--eval-tokens", 48, "--eval-dtype", "float32")
    results = json.loads((tmp_path / "05" / "results.json").read_text())
    assert results["identical_outputs"] == 1.0
    assert results["acceptance_length"] >= 3.8  # 4 is all; the verification that holds the answer's end may be cut short
