"""On a real language model: ids that are the server's, parity of the states, one row overfitted to full served acceptance."""
import json
import random
from concurrent.futures import ThreadPoolExecutor

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
    for name, chosen in (("eval", [row]), ("others", [r for r in rows if r is not row])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"id": r["id"], "messages": r["messages"][:-1]}) + "\n" for r in chosen))
    script("02_prepare", "--answers", answers, "--model", MODEL, "--out", tmp_path / "02", "--val-share", 0)
    script("03_extract", "--tokens", tmp_path / "02", "--model", MODEL, "--out", tmp_path / "03", "--extract-dtype", "float32")
    script("04_train", "--tokens", tmp_path / "02", "--states", tmp_path / "03", "--model", MODEL, "--out", tmp_path / "04",
           "--draft-vocab", 512, "--epochs", 90, "--batch-tokens", 96, "--lr", "2e-3")
    script("05_eval", "--draft", tmp_path / "04", "--model", MODEL, "--eval-prompts", tmp_path / "eval.jsonl",
           tmp_path / "others.jsonl", "--out", tmp_path / "05", "--eval-tokens", 48, "--eval-dtype", "float32", "--eval-concurrency", 4,
           "--eval-rounds", 1)
    results = json.loads((tmp_path / "05" / "results.json").read_text())
    assert results["identical_outputs"] == 1.0
    for name, r in results["sets"].items():
        assert abs(r["within_answers"] - results["walked"]["trained"][name]) <= 0.03, name
    lengths = {name: r["acceptance_length"] for name, r in results["sets"].items()}
    assert lengths["eval"] >= 3.7 > lengths["others"]  # 4 is all; of 13 verifications one may miss


# --- the ids that are trained -----------------------------------------------------------------------------------------

WORDS = ["sea", "Zoë", "日本", "\U0001f600", "<|im_end|>", "<|im_start|>user\n", "\n\n", "  ", "\t", "\u2028", "e\u0301", "don't", "3.14", "</s>", "{{x}}"]


def conversations(n):
    """Chats of one to three questions, some with a system prompt, content in parts or null, earlier answers included."""
    chance = random.Random(0)

    def text(least=1):
        return " ".join(chance.choices(WORDS, k=chance.randint(least, 6)))
    for k in range(n):
        messages = [{"role": "system", "content": text()}] * (k % 3 == 0)
        for _ in range(k % 4 // 2):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        messages.append({"role": "user", "content": [{"type": "text", "text": text()} for _ in range(1 + k % 2)] if k % 5 == 0 else text(0)})
        yield messages


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """200 chats with the server's ids; of every tenth an answer of 12 tokens, and to that a second question and answer."""
    from api import Api
    from sglang_server import serve

    with serve(MODEL, tmp_path_factory.mktemp("asked") / "log", max_requests=16) as url:
        api = Api(url + "/v1")

        def ask(messages, tokens):
            reply = api.post("/chat/completions", {"model": MODEL.name, "messages": messages, "temperature": 1.0, "max_tokens": tokens,
                                                   "return_prompt_token_ids": True, "return_token_ids": True})["choices"][0]
            return {"prompt_ids": reply["prompt_token_ids"], "answer_ids": reply["response_token_ids"], "finish_reason": reply["finish_reason"],
                    "content": reply["message"]["content"], "role": "assistant"}

        def chat(numbered):
            number, messages = numbered
            if number % 10:
                return {"id": str(number), "messages": [*messages, ask(messages, 1)]}
            messages = [*messages, ask(messages, 12)]
            clean = [{k: m[k] for k in ("role", "content")} for m in messages]
            follow_up = {"role": "user", "content": "And then?"}
            return {"id": str(number), "messages": [*messages, follow_up, ask([*clean, follow_up], 12)]}

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(chat, enumerate(conversations(200))))


def test_prompt_ids_are_those_of_the_server(asked):
    import chat

    tokenizer = chat.load_tokenizer(MODEL)
    answers = [(row, i) for row in asked for i, m in enumerate(row["messages"]) if "prompt_ids" in m]
    assert len(answers) == 220
    for row, i in answers:
        assert chat.render(tokenizer, chat.conversation(row)[:i], answer_next=True) == row["messages"][i]["prompt_ids"], row["id"]


def test_every_trained_token_was_produced_by_the_server_and_all_of_them_are_trained(asked, tmp_path):
    from datasets import load_from_disk

    (tmp_path / "01").mkdir()
    (tmp_path / "01" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (tmp_path / "01" / "done.json").write_text("{}")
    printed = script("02_prepare", "--answers", tmp_path / "01", "--model", MODEL, "--out", tmp_path / "02", "--max-dropped", 1)
    produced = {row["id"]: [m["answer_ids"] for m in row["messages"] if "answer_ids" in m] for row in asked}
    trained = {}
    for sample in load_from_disk(tmp_path / "02" / "dataset").with_format(None):
        trained.setdefault(sample["id"], []).extend(t for t, m in zip(sample["input_ids"], sample["loss_mask"]) if m)
    end = json.loads((tmp_path / "02" / "contract.json").read_text())["end_of_turn_ids"]
    wanted = {name: [t for answer in answers if set(answer) - {*end} for t in answer] for name, answers in produced.items()}
    assert trained == {name: ids for name, ids in wanted.items() if ids} and len(trained) > 150
    done = json.loads((tmp_path / "02" / "done.json").read_text())
    assert "prompt differs" not in done["retokenised"], printed
