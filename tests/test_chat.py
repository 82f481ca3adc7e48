"""Conversations to ids and mask: templates of every family, rows that can't be trained, and 02_prepare as a process."""
import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

import chat
import contract
import stage
import tiny
from chat import Dropped
from misbehaving import refusal, run
from stage import Refused

torch.set_num_threads(1)
TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>"]
# the template's family: (its beginning of text, its end of turn, what stands before and after a user's text "Q")
FAMILIES = {
    "chatml": ("", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
    "llama3": ("<|endoftext|>", "<|eot_id|>", "<|endoftext|><|start_header_id|>user<|end_header_id|>\n\n",
               "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": ("<s>", "</s>", "<s> [INST] ", " [/INST]"),
    "think": ("", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"),
}


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def family(tiny_target):
    """family(name): a byte tokenizer that adds a beginning of text by itself, with that chat template."""
    def build(name):
        tokenizer = AutoTokenizer.from_pretrained(tiny_target)
        tokenizer.add_tokens(SPECIALS, special_tokens=True)
        bos, end, _, _ = FAMILIES.get(name, FAMILIES["chatml"])
        tokenizer.chat_template = tiny.TEMPLATE if name == "chatml" else (TEMPLATES / f"{name}.jinja").read_text()
        tokenizer.bos_token, tokenizer.eos_token = bos or "<|endoftext|>", end
        first = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)])
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # so a second one would show
        return tokenizer, {tokenizer.eos_token_id}
    return build


def row(*texts, **more):
    """A conversation of user and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)], **more}


def split(tokenizer, ids, mask):
    """(text that is not trained, text that is), and both in order: no 0 after the first 1."""
    assert len(ids) == len(mask) and mask == sorted(mask)
    start = mask.index(1)
    return tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])


# --- sample -----------------------------------------------------------------------------------------------------------

def test_ids_that_the_server_gave_are_used_as_they_are(family):
    tokenizer, ends = family("chatml")
    ids, mask = chat.sample(tokenizer, row("other", "text", prompt_ids=[11, 12, 13], answer_ids=[14, 2]), ends)
    assert (ids, mask) == ([11, 12, 13, 14, 2], [0, 0, 0, 1, 1])


def test_stored_ids_of_a_cut_answer_get_no_end_of_turn(family):
    tokenizer, ends = family("chatml")
    ids, mask = chat.sample(tokenizer, row("a", "b", prompt_ids=[11], answer_ids=[14, 15], finish_reason="length"), ends)
    assert (ids, mask) == ([11, 14, 15], [0, 1, 1])


def test_stored_ids_that_only_end_the_turn_are_dropped(family):
    tokenizer, ends = family("chatml")
    with pytest.raises(Dropped, match="empty answer"):
        chat.sample(tokenizer, row("a", "b", prompt_ids=[11], answer_ids=[2]), ends)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("turns", [("Q", "A one."), ("Q", "first", "more?", "A two.\nlines")])
def test_the_mask_covers_the_answer_and_its_end_of_turn_and_nothing_else(family, name, turns):
    tokenizer, ends = family(name)
    end = tokenizer.eos_token
    prompt, trained = split(tokenizer, *chat.sample(tokenizer, row(*turns), ends))
    assert trained.lstrip(" ") == turns[-1] + end                 # header out, trailing newline out
    assert trained.startswith(" ") == (name == "mistral")         # there the blank is the answer's first token
    wanted = FAMILIES[name][3]
    assert prompt.endswith(wanted) and turns[-1] not in prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_template_and_begin_with_one_beginning_of_text(family, name):
    tokenizer, ends = family(name)
    ids, _ = chat.sample(tokenizer, row("Q", "A"), ends)
    bos, end, before, after = FAMILIES[name]
    text = before + "Q" + after + (" A" if name == "mistral" else "A") + end
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == (1 if bos else 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_answer_gets_no_end_of_turn(family, name):
    tokenizer, ends = family(name)
    ids, mask = chat.sample(tokenizer, row("Q", "cut in the mid", finish_reason="length"), ends)
    assert split(tokenizer, ids, mask)[1].strip() == "cut in the mid" and not ends & {t for t, m in zip(ids, mask) if m}


@pytest.mark.parametrize("text", ["\nnewline first", " blank first", "\ttab", "\u0301accent", "\U0001f600 emoji", "\u2028separator",
                                  "\x85next line"])
def test_the_first_token_of_an_odd_answer_is_trained(family, text):
    tokenizer, ends = family("chatml")
    assert split(tokenizer, *chat.sample(tokenizer, row("Q", text), ends))[1] == text + "<|im_end|>"


def test_an_answer_that_merges_with_its_header_is_dropped_and_not_shifted(family):
    tokenizer, ends = family("chatml")
    tokenizer.add_tokens(["\n\n"])                                # two newlines are one token
    assert len(tokenizer("\n\n", add_special_tokens=False)["input_ids"]) == 1
    with pytest.raises(Dropped, match="template rewrites history"):
        chat.sample(tokenizer, row("Q", "\nanswer"), ends)
    chat.sample(tokenizer, row("Q", "answer"), ends)              # the others are not


def test_thinking_is_kept_in_the_trained_answer_where_the_template_strips_it_from_history(family):
    tokenizer, ends = family("think")
    prompt, trained = split(tokenizer, *chat.sample(tokenizer, row("Q", "<think>a</think>one", "R", "<think>b</think>two"), ends))
    assert trained == "<think>b</think>two<|im_end|>" and "<think>a" not in prompt and "one" in prompt


def test_an_answer_that_the_template_shortens_is_dropped(family):
    tokenizer, ends = family("think_never")
    chat.sample(tokenizer, row("Q", "two"), ends)
    with pytest.raises(Dropped):                                  # else "two" is trained where the target would think
        chat.sample(tokenizer, row("Q", "<think>b</think>two"), ends)


def test_an_answer_that_the_template_shortens_is_dropped_though_the_question_quotes_it(family):
    tokenizer, ends = family("think_never")
    with pytest.raises(Dropped):
        chat.sample(tokenizer, row("Say <think>b</think>two", "<think>b</think>two"), ends)


def test_a_template_that_opens_answers_in_another_way_than_it_renders_them_drops_the_row(family):
    tokenizer, ends = family("think_open")
    with pytest.raises(Dropped, match="template rewrites history"):
        chat.sample(tokenizer, row("Q", "two"), ends)


def test_a_template_that_raises_on_a_role_drops_that_row_only(family):
    tokenizer, ends = family("mistral")
    system = row("Q", "A")
    system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    with pytest.raises(Dropped, match="chat template failed"):
        chat.sample(tokenizer, system, ends)
    chat.sample(tokenizer, row("Q", "A"), ends)


def test_a_system_prompt_is_in_the_ids_and_not_trained(family):
    tokenizer, ends = family("chatml")
    system = row("Q", "A")
    system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    prompt, trained = split(tokenizer, *chat.sample(tokenizer, system, ends))
    assert "Be brief." in prompt and trained == "A<|im_end|>"


@pytest.mark.parametrize("content", ["", "  \n\t", None])
def test_an_empty_answer_is_dropped(family, content):
    tokenizer, ends = family("chatml")
    with pytest.raises(Dropped, match="empty answer"):
        chat.sample(tokenizer, row("Q", content), ends)


@pytest.mark.parametrize("messages", [[], None, [{"role": "assistant", "content": "A"}], [{"role": "user", "content": "Q"}],
                                      [{"role": "system", "content": "S"}],
                                      [{"role": "user", "content": "Q"}, {"role": "user", "content": "R"}]])
def test_a_conversation_without_an_answered_question_is_dropped(family, messages):
    tokenizer, ends = family("chatml")
    with pytest.raises(Dropped, match="no answer"):
        chat.sample(tokenizer, {"messages": messages}, ends)


@pytest.mark.parametrize("content", [[{"type": "text", "text": "A"}], 7, {"text": "A"}])
def test_an_answer_that_is_no_text_is_dropped(family, content):
    tokenizer, ends = family("chatml")
    with pytest.raises(Dropped):
        chat.sample(tokenizer, row("Q", content), ends)


def test_end_of_turn_ids_are_those_of_tokenizer_generation_config_and_config(tiny_target, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert chat.end_of_turn_ids(tokenizer, tiny_target) == {2}
    for name, ids in (("generation_config.json", [2, 7]), ("config.json", [5])):
        (tmp_path / name).write_text(json.dumps(json.loads((Path(tiny_target) / name).read_text()) | {"eos_token_id": ids}))
    assert chat.end_of_turn_ids(tokenizer, tmp_path) == {2, 5, 7}


# --- user_turn --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FAMILIES)
def test_the_opening_of_a_user_turn_and_what_closes_it(family, name):
    tokenizer, _ = family(name)
    prefix, stop = chat.user_turn(tokenizer)
    assert prefix == tokenizer(FAMILIES[name][2], add_special_tokens=False)["input_ids"]
    assert prefix.count(tokenizer.bos_token_id) == (1 if FAMILIES[name][0] else 0)
    assert stop == ({"stop": ["[/INST]"]} if name == "mistral" else {"stop_token_ids": [tokenizer.eos_token_id]})


def test_a_user_turn_that_plain_text_closes_stops_at_that_text(family):
    tokenizer, _ = family("plain")
    prefix, stop = chat.user_turn(tokenizer)
    assert tokenizer.decode(prefix) == "User: " and stop == {"stop": ["Assistant:"]}


@pytest.mark.parametrize("name, complaint", [("no_user", "does not render a user turn"), ("unclosed", "does not close a user turn")])
def test_a_template_without_a_whole_user_turn_is_refused_with_the_way_out(family, name, complaint):
    with pytest.raises(Refused, match=f"{complaint}.*--prompts FILE"):
        chat.user_turn(family(name)[0])


# --- looping ----------------------------------------------------------------------------------------------------------

COUNTING = " ".join(f"step {k} of the plan is to go on with step {k + 1} ," for k in range(40)).split()


@pytest.mark.parametrize("tokens", [[5] * 30, [1, 2, 3] * 20, ("I am happy to help you . " * 12).split(),
                                    list(range(100)) + [7, 8, 9, 10, 11] * 60, [1, 2] * 12], ids=str)
def test_sequences_that_go_round_in_circles_loop(tokens):
    assert chat.looping(tokens)


ORDINARY = {path.name: path.read_text().split() for path in (Path(__file__).parent.parent / "scripts").glob("*.py")}
ORDINARY |= {"counting": COUNTING, "ids": random.Random(0).choices(range(300), k=2000),
             "table": " ".join(f"{a} x {b} = {a * b}" for a in range(9) for b in range(9)).split(),
             "short": [5] * 23, "none": []}


@pytest.mark.parametrize("name", ORDINARY)
def test_prose_code_and_ids_do_not_loop(name):
    assert not chat.looping(ORDINARY[name])


# --- 02_prepare as a process ------------------------------------------------------------------------------------------

GOOD = [row(f"question {k}?", f"answer {k}\u2028and more {'x' * (k % 5)}", id=f"row-{k}") for k in range(40)]
GOOD[3] |= {"prompt_ids": [50, 51, 52], "answer_ids": [60, 61, 2]}
GOOD[4] |= {"finish_reason": "length"}
BAD = [row("Q", "", id="empty"), row("Q", "  ", id="blank"), {"id": "nothing", "messages": []},
       {"id": "alone", "messages": [{"role": "assistant", "content": "A"}]}, row("Q", "word " * 400, id="long")]


def answers(folder, rows):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    (folder / "done.json").write_text("{}\n")
    return folder


def prepare(folder, out, tiny_target):
    return run("02_prepare.py", "--answers", folder, "--model", tiny_target, "--out", out, "--val-share", 0.3, "--max-seq-len", 500)


@pytest.fixture(scope="module")
def prepared(tiny_target, tmp_path_factory):
    """02_prepare on 40 good rows with 5 bad ones among them."""
    path = tmp_path_factory.mktemp("prepared")
    mixed = GOOD[:10] + BAD[:2] + GOOD[10:30] + BAD[2:] + GOOD[30:]
    code, printed = prepare(answers(path / "01", mixed), path / "02", tiny_target)
    assert code == 0, printed
    return path / "02"


def read(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def table(prepared):
    from datasets import load_from_disk
    return load_from_disk(prepared / "dataset")


def test_rows_in_are_rows_out_and_rows_dropped_by_reason(prepared):
    done = stage.done(prepared)
    assert (done["rows_in"], done["rows_out"]) == (45, 40)
    assert done["dropped"] == {"empty answer": 2, "no answer": 2, "too long": 1}
    assert len(table(prepared)) == 40 and done["train_rows"] + done["val_rows"] == 40


def test_the_dataset_keeps_the_order_and_says_of_each_row_what_speculators_reads(prepared, family):
    tokenizer, ends = family("chatml")
    data = table(prepared)
    assert list(data["id"]) == [r["id"] for r in GOOD]
    assert data.column_names == ["input_ids", "loss_mask", "seq_len", "id", "split"]
    for made, source in zip(data.with_format(None), GOOD):
        assert (made["input_ids"], made["loss_mask"]) == chat.sample(tokenizer, source, ends)
        assert made["seq_len"] == len(made["input_ids"])


def test_speculators_own_dataset_reads_it_with_its_states(prepared, tmp_path):
    from hs_connectors import FileTransfer
    from safetensors.torch import save_file
    from speculators.train.data import ArrowDataset

    ids = table(prepared)[5]["input_ids"]
    assert ids.dtype == torch.int64                               # the torch format is stored with the dataset
    save_file({"hidden_states": torch.zeros(len(ids), 4, 64, dtype=torch.bfloat16), "token_ids": ids}, tmp_path / "hs_5.safetensors")
    sample = ArrowDataset(512, prepared / "dataset", FileTransfer(tmp_path), on_missing="raise")[5]
    assert torch.equal(sample["input_ids"], ids) and torch.equal(sample["loss_mask"], table(prepared)[5]["loss_mask"])
    assert sample["hidden_states"].shape == (len(ids), 3 * 64)


def test_token_counts_are_of_the_masked_tokens_of_the_training_split(prepared):
    wanted = {}
    for made in table(prepared).with_format(None):
        for token, masked in zip(made["input_ids"], made["loss_mask"]):
            if masked and made["split"] == "train":
                wanted[token] = wanted.get(token, 0) + 1
    assert torch.load(prepared / "token_freq.pt", weights_only=True) == wanted
    assert json.loads((prepared / "coverage.json").read_text())[-1] == [len(wanted), 1.0]
    assert (prepared / "coverage.png").stat().st_size > 1000


def test_the_held_out_prompts_are_those_of_the_validation_split(prepared):
    validation = [i for i, s in zip(table(prepared)["id"], table(prepared)["split"]) if s == "val"]
    assert 4 <= len(validation) <= 20
    held = read(prepared / "heldout.jsonl")
    assert [h["id"] for h in held] == validation
    prompts = {r["id"]: r["messages"][:-1] for r in GOOD}
    assert all(h == {"id": h["id"], "messages": prompts[h["id"]]} for h in held)


def test_the_contract_names_target_tokenizer_template_and_ends(prepared, tiny_target):
    template = hashlib.sha256(tiny.TEMPLATE.encode()).hexdigest()[:16]
    assert contract.read(prepared) == {"target": stage.model_identity(Path(tiny_target)), "chat_template": template,
                                       "tokenizer": contract.tokenizer_hash(Path(tiny_target)), "end_of_turn_ids": [2]}


def test_a_broken_line_is_named_and_the_stage_goes_on_once_it_is_mended_with_the_same_splits(prepared, tiny_target, tmp_path):
    more = [row("Q?", "added", id=f"added-{k}") for k in range(5)] + GOOD
    folder = answers(tmp_path / "01", more)
    whole = (folder / "rows.jsonl").read_text()
    lines = whole.split("\n")
    lines[6] = lines[6][:20]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    code, printed = prepare(folder, tmp_path / "02", tiny_target)
    assert code == 2 and f"{folder}/rows.jsonl line 7" in refusal(printed)
    assert not (tmp_path / "02" / "done.json").exists()
    (folder / "rows.jsonl").write_text(whole)
    code, printed = prepare(folder, tmp_path / "02", tiny_target)
    assert code == 0, printed
    splits = [dict(zip(table(p)["id"], table(p)["split"])) for p in (prepared, tmp_path / "02")]
    assert len(splits[1]) == 45 and splits[0].items() <= splits[1].items()


def test_a_finished_stage_says_so_and_computes_nothing(prepared, tiny_target):
    before = {p: p.read_bytes() for p in prepared.rglob("*") if p.is_file() and p.name != ".lock"}
    code, printed = prepare(prepared.parent / "01", prepared, tiny_target)
    assert code == 0 and "is done already" in printed
    assert all(p.read_bytes() == data for p, data in before.items())


def test_a_row_without_an_id_is_refused_with_its_line(tiny_target, tmp_path):
    code, printed = prepare(answers(tmp_path / "01", [GOOD[0], row("Q", "A")]), tmp_path / "02", tiny_target)
    assert code == 2, printed
    assert "rows.jsonl line 2" in refusal(printed)


def test_rows_of_which_none_can_be_trained_are_refused_with_the_reasons(tiny_target, tmp_path):
    code, printed = prepare(answers(tmp_path / "01", BAD), tmp_path / "02", tiny_target)
    assert code == 2, printed
    assert "'empty answer': 2" in refusal(printed)
