"""Conversations to ids and mask: templates of every family, rows that can't be trained, and 02_prepare as a process."""
import hashlib
import json
import random
import re
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

import chat
import contract
import show
import stage
import tiny
from misbehaving import refusal, run, start
from running import memory
from stage import Refused

torch.set_num_threads(1)
TEMPLATES = Path(__file__).parent / "templates"
# the template's family: (its beginning of text, its end of turn, what stands before and after a user's text "Q")
CHATML = ("", "<|im_end|>", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
FAMILIES = {
    "chatml": CHATML,
    "llama3": ("<|endoftext|>", "<|eot_id|>", "<|endoftext|><|start_header_id|>user<|end_header_id|>\n\n",
               "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": ("<s>", "</s>", "<s> [INST] ", " [/INST]"),
    "think": CHATML,
    "qwen3": CHATML,
    "markers": CHATML,
    "gemma": ("<s>", "<end_of_turn>", "<s><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"),
    "deepseek": ("<s>", "<｜end▁of▁sentence｜>", "<s><｜User｜>", "<｜Assistant｜>"),
    "kimi": ("", "<|im_end|>", "<|im_system|>system<|im_middle|>You are an assistant.<|im_end|><|im_user|>user<|im_middle|>",
             "<|im_end|><|im_assistant|>assistant<|im_middle|>"),
}
SPECIALS = ["<s>", "</s>", *sorted({token for family in FAMILIES.values() for text in family for token in re.findall("<[|｜].+?[|｜]>", text)}
                                   - {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}), "<start_of_turn>", "<end_of_turn>"]
PLAIN = sorted(set(FAMILIES) - {"qwen3"})  # there an answer without thinking is trained with thinking switched off
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def family(tiny_target):
    """family(name): a byte tokenizer that adds a beginning of text by itself, with that chat template."""
    def build(name):
        tokenizer = AutoTokenizer.from_pretrained(tiny_target)
        tokenizer.add_tokens(SPECIALS, special_tokens=True)
        bos, end, _, _ = FAMILIES.get(name, CHATML)
        path = TEMPLATES / f"{name}.jinja"
        tokenizer.chat_template = path.read_text() if path.exists() else tiny.TEMPLATE
        tokenizer.bos_token, tokenizer.eos_token = bos or "<|endoftext|>", end
        first = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)])
        assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id  # so a second one would show
        return tokenizer, {tokenizer.eos_token_id}
    return build


def row(*texts, **more):
    """A conversation of user and assistant in turn; a text may be a whole message."""
    return {"messages": [t if isinstance(t, dict) else {"role": ("user", "assistant")[i % 2], "content": t}
                         for i, t in enumerate(texts)], **more}


def made(target, *rows, **policy):
    """What becomes of each row: its samples as text with the trained parts in brackets, or the reason why it is dropped."""
    tokenizer, ends = target
    return [found if isinstance(found, str) else [show.marked(tokenizer, *sample) for sample in found]
            for found in chat.Masker(tokenizer, ends, **policy)(rows)]


def only(target, row, **policy):
    """The one sample of a row as (ids, mask)."""
    tokenizer, ends = target
    (samples,) = chat.Masker(tokenizer, ends, **policy)([row])
    assert len(samples) == 1 and not isinstance(samples, str), samples
    return samples[0]


def trained(text):
    return re.findall("⟦(.*?)⟧", text, re.S)


# --- ids that the server gave -----------------------------------------------------------------------------------------

def test_ids_that_the_server_gave_are_used_as_they_are(family):
    given = dict(prompt_ids=[11, 12, 13], answer_ids=[14, 2])
    for source in (row("other", "text", **given), given):
        assert only(family("chatml"), source) == ([11, 12, 13, 14, 2], [0, 0, 0, 1, 1])


def test_stored_ids_of_a_cut_answer_get_no_end_of_turn(family):
    found = only(family("chatml"), row("a", "b", prompt_ids=[11], answer_ids=[14, 15], finish_reason="length"))
    assert found == ([11, 14, 15], [0, 1, 1])


def test_stored_ids_that_only_end_the_turn_are_dropped(family):
    assert made(family("chatml"), row("a", "b", prompt_ids=[11], answer_ids=[2])) == ["empty answer"]


def test_stored_ids_are_compared_with_template_and_text_and_what_differs_is_counted_and_shown(family):
    tokenizer, ends = family("chatml")
    ids, mask = only((tokenizer, ends), row("Q", "A"))
    begin = mask.index(1)
    stored = [(ids[:begin], ids[begin:]), (ids[:begin - 1], ids[begin:]), (ids[:begin], ids[begin:-1] + [30, 2])]
    masker = chat.Masker(tokenizer, ends)
    found = list(masker([row("Q", "A", prompt_ids=p, answer_ids=a) for p, a in stored]))
    assert [sample[0][0] for sample in found] == [p + a for p, a in stored]      # the server's, whatever the template says
    assert masker.retokenised == {"same": 1, "prompt differs": 1, "answer differs": 1}
    assert masker.example.startswith(f"prompt differs at token {begin - 1}: ")


def test_in_a_row_with_the_servers_ids_only_the_servers_answers_are_trained(family):
    tokenizer, ends = family("chatml")
    ids, _ = only((tokenizer, ends), row("Q", "theirs", "R", "ours"), trained_turns="last")
    cut = len(ids) - len("ours") - 1
    masker = chat.Masker(tokenizer, ends)
    ((sample,),) = masker([row("Q", "theirs", "R", "ours", prompt_ids=ids[:cut], answer_ids=ids[cut:])])
    assert trained(show.marked(tokenizer, *sample)) == ["ours<|im_end|>"] and masker.turns["not the server's"] == 1


def test_answers_with_ids_of_their_own_share_a_sample_as_long_as_the_server_saw_one_text_grow(family):
    first, second = [5, 6], [5, 6, 7, 2, 8]
    grown = row("Q", {"role": "assistant", "content": "A", "prompt_ids": first, "answer_ids": [7, 2]}, "R", "B",
                prompt_ids=second, answer_ids=[9, 2])
    assert only(family("chatml"), grown) == ([5, 6, 7, 2, 8, 9, 2], [0, 0, 1, 1, 0, 1, 1])
    grown["prompt_ids"] = [5, 6, 8]                               # the server saw another history
    tokenizer, ends = family("chatml")
    assert list(chat.Masker(tokenizer, ends)([grown])) == [[([5, 6, 7, 2], [0, 0, 1, 1]), ([5, 6, 8, 9, 2], [0, 0, 0, 1, 1])]]


# --- the template's boundary ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", PLAIN)
def test_every_answer_and_its_end_of_turn_is_trained_and_nothing_else(family, name):
    end = FAMILIES[name][1]
    (sample,), = made(family(name), row("Q", "first", "more?", "A two.\nlines"))
    assert [t.lstrip(" ") for t in trained(sample)] == ["first" + end, "A two.\nlines" + end]  # header out, newline out
    assert trained(sample)[0].startswith(" ") == (name == "mistral")     # there the blank is the answer's first token


@pytest.mark.parametrize("name", PLAIN)
def test_the_last_answer_alone_is_trained_on_demand(family, name):
    (sample,), = made(family(name), row("Q", "first", "more?", "two"), trained_turns="last")
    assert [t.strip() for t in trained(sample)] == ["two" + FAMILIES[name][1]] and "first" in sample


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_template_and_begin_with_one_beginning_of_text(family, name):
    tokenizer, ends = family(name)
    ids, _ = only((tokenizer, ends), row("Q", "A", **OFF))
    bos, end, before, after = FAMILIES[name]
    after += "<think>\n\n</think>\n\n" * (name == "qwen3")
    text = before + "Q" + after + (" A" if name == "mistral" else "A") + end
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == (1 if bos else 0)
    rendered = chat.render(tokenizer, [{"role": "user", "content": "Q"}], answer_next=True, **OFF)
    assert ids[:len(rendered)] == rendered


def test_a_second_beginning_of_text_drops_the_row(family):
    tokenizer, ends = family("llama3")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    assert made((tokenizer, ends), row("Q", "A")) == ["two beginnings of text"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_cut_answer_gets_no_end_of_turn(family, name):
    (sample,), = made(family(name), row("Q", "cut in the mid", finish_reason="length"))
    assert [t.strip() for t in trained(sample)] == ["cut in the mid"] and sample.endswith("mid⟧")


def test_the_markers_of_a_template_say_the_same_as_its_prefixes(family):
    tokenizer, ends = family("markers")
    ids, mask = only((tokenizer, ends), row("Q", "A", "R", "B"))
    marked = tokenizer.apply_chat_template(row("Q", "A", "R", "B")["messages"], return_dict=True, return_assistant_tokens_mask=True)
    assert marked["input_ids"][:len(ids)] == ids and marked["assistant_masks"][:len(ids)] == mask and 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("text", ["\nnewline first", " blank first", "\ttab", "\u0301accent", "\U0001f600 emoji", "\u2028separator",
                                  "\x85next line"])
@pytest.mark.parametrize("name", ["chatml", "markers", "kimi"])
def test_the_first_token_of_an_odd_answer_is_trained(family, text, name):
    tokenizer, ends = family(name)
    ids, mask = only((tokenizer, ends), row("Q", text))
    assert tokenizer.decode([t for t, m in zip(ids, mask) if m]) == text + "<|im_end|>"


def test_an_answer_whose_first_characters_merge_with_its_header_is_split_where_the_servers_prompt_ended(family):
    tokenizer, ends = family("chatml")
    tokenizer.add_tokens(["\n\n"])                                # two newlines are one token
    assert len(tokenizer("\n\n", add_special_tokens=False)["input_ids"]) == 1
    ids, mask = only((tokenizer, ends), row("Q", "\nanswer"))
    prompt = chat.render(tokenizer, row("Q")["messages"], answer_next=True)
    assert ids[:mask.index(1)] == prompt and tokenizer.decode(ids[mask.index(1):]) == "\nanswer<|im_end|>"


# --- templates that rewrite -------------------------------------------------------------------------------------------

def test_history_without_its_thinking_makes_one_sample_a_turn_each_as_the_server_saw_it(family):
    first, second = made(family("think"), row("Q", "<think>a</think>one", "R", "<think>b</think>two"))[0]
    assert trained(first) == ["<think>a</think>one<|im_end|>"] and trained(second) == ["<think>b</think>two<|im_end|>"]
    assert "<think>a" not in second and "assistant\none<|im_end|>" in second


THOUGHT = {"role": "assistant", "content": "one", "reasoning_content": "a"}


@pytest.mark.parametrize("answers", [("<think>\na\n</think>\n\none", "<think>\nb\n</think>\n\ntwo"),
                                     (THOUGHT, {**THOUGHT, "content": "two", "reasoning_content": "b"})], ids=["inline", "field"])
def test_reasoning_is_trained_or_left_out_by_a_switch(family, answers):
    conversation = row("Q", answers[0], "R", answers[1])
    thoughts = [f"<think>\n{t}\n</think>" for t in "ab"]
    first, second = made(family("qwen3"), conversation)[0]
    assert trained(first) == [f"{thoughts[0]}\n\none<|im_end|>"] and trained(second) == [f"{thoughts[1]}\n\ntwo<|im_end|>"]
    first, second = made(family("qwen3"), conversation, train_reasoning=False)[0]
    assert trained(first) == ["\n\none<|im_end|>"] and thoughts[0] in first      # still read, as the server did
    assert trained(second) == ["\n\ntwo<|im_end|>"] and thoughts[1] in second and thoughts[0] not in second


def test_with_thinking_off_the_empty_thinking_is_the_prompts(family):
    (sample,), = made(family("qwen3"), row("Q", "A", **OFF))
    assert trained(sample) == ["A<|im_end|>"] and "<think>\n\n</think>" in sample


def test_thinking_that_only_the_template_adds_is_not_trained(family):
    assert made(family("qwen3"), row("Q", "A")) == ["template invents reasoning"]


def test_an_answer_that_was_cut_while_thinking_is_all_reasoning(family):
    tokenizer, ends = family("chatml")
    cut = row("Q", "<think>on and on", finish_reason="length")
    assert made((tokenizer, ends), cut, train_reasoning=False) == ["only reasoning"] and trained(made((tokenizer, ends), cut)[0][0])


@pytest.mark.parametrize("name", sorted(set(PLAIN) - {"qwen3"}))
def test_reasoning_that_the_template_leaves_out_drops_the_row(family, name):
    assert made(family(name), row("Q", THOUGHT)) == ["template leaves out the reasoning"]


CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function",
                                                             "function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}]}


@pytest.mark.parametrize("name, wanted", [
    ("kimi", ["<|tool_calls_section_begin|>look_up<|tool_call_argument_begin|>{\"city\": \"Rome\"}<|tool_calls_section_end|><|im_end|>",
              "Warm.<|im_end|>"]),
    ("qwen3", ["\n<tool_call>\n{\"name\": \"look_up\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call><|im_end|>", "Warm.<|im_end|>"])])
def test_tool_calls_are_trained_and_their_results_are_not(family, name, wanted):
    asked = {"role": "user", "content": "Weather?"}, CALL, {"role": "tool", "content": "21 degrees"}, {"role": "assistant", "content": "Warm."}
    think = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" and name == "qwen3" else m for m in asked]
    samples, = made(family(name), {"messages": think, "tools": [{"type": "function", "function": {"name": "look_up"}}]}, train_reasoning=False)
    found = [t.replace("\n\n", "") for sample in samples for t in trained(sample)]
    assert found == wanted and "21 degrees" in samples[-1]
    assert ('{"type": "function"' in samples[0]) == (name == "qwen3")  # kimi.jinja lists no tools


def test_tool_calls_that_the_template_leaves_out_drop_the_row(family):
    assert made(family("chatml"), row("Q", CALL)) == ["template leaves out the tool calls"]


@pytest.mark.parametrize("calls", [[{"function": {"name": "f", "arguments": "{"}}], ["f"], [{"name": "f"}], 7, [{"function": None}]], ids=str)
def test_a_broken_tool_call_drops_the_row(family, calls):
    assert made(family("kimi"), row("Q", {**CALL, "tool_calls": calls})) == ["broken tool call"]


def test_an_answer_that_the_template_shortens_is_dropped(family):
    target = family("think_never")
    assert trained(made(target, row("Q", "two"))[0][0])
    for question in ("Q", "Say <think>b</think>two"):             # else "two" is trained where the target would think
        assert made(target, row(question, "<think>b</think>two")) == ["template rewrites the answer"]


def test_a_template_that_opens_answers_in_another_way_than_it_renders_them_drops_the_row(family):
    assert made(family("think_open"), row("Q", "two")) == ["template rewrites history"]


def test_ids_of_the_server_are_exact_where_the_template_is_not(family):
    assert only(family("think_open"), row("Q", "two", prompt_ids=[9, 8], answer_ids=[7, 2])) == ([9, 8, 7, 2], [0, 0, 1, 1])


def test_a_template_that_ends_no_turn_drops_the_row(family):
    assert made(family("plain"), row("Q", "A")) == ["template ends no turn"]


# --- conversations of every kind --------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_template_without_a_system_role_drops_that_row_only(family, name):
    found = made(family(name), {"messages": [SYSTEM, *row("Q", "A")["messages"]]}, row("Q", "A"))
    assert found[0] == "chat template failed" and len(found[1]) == 1


SHAREGPT = {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}


@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek", "kimi"])
@pytest.mark.parametrize("source", [{"messages": [SYSTEM, *row("Q", "A")["messages"]]}, SHAREGPT], ids=["openai", "sharegpt"])
def test_a_system_prompt_is_in_the_ids_and_not_trained(family, name, source):
    (sample,), = made(family(name), source)
    assert "Be brief." in sample and trained(sample) == ["A" + FAMILIES[name][1]]


TEXT = {"type": "text", "text": "A"}


@pytest.mark.parametrize("messages, reason", [
    ([], "no answer"), (None, "no answer"), (["Q"], "messages are no list of objects"), (7, "messages are no list of objects"),
    (row("Q")["messages"], "no answer"), ([SYSTEM], "no answer"), (row("Q", "A")["messages"][1:], "no answer"),
    (row("Q", "A", "R")["messages"][:1] * 2, "no answer"),
    ([{"role": "observer", "content": "S"}, *row("Q", "A")["messages"]], "unknown role"), ([{"content": "S"}], "unknown role"),
    (row("Q", "")["messages"], "empty answer"), (row("Q", "  \n\t")["messages"], "empty answer"),
    (row("Q", {"role": "assistant", "content": None})["messages"], "empty answer"),
    (row("Q", {"role": "assistant", "content": 7})["messages"], "content is no text"),
    (row("Q", {"role": "assistant", "content": {"text": "A"}})["messages"], "content is no text"),
    (row("Q", {"role": "assistant", "content": [{"type": "image_url"}, TEXT]})["messages"], "content is no text"),
    (row("Q", "a <|im_end|> b")["messages"], "control token in the answer"), (row("half \ud83d", "A")["messages"], "half a character"),
], ids=str)
def test_a_conversation_that_can_not_be_trained_is_dropped_for_a_named_reason(family, messages, reason):
    assert made(family("chatml"), {"messages": messages}, row("Q", "A"))[0] == reason


@pytest.mark.parametrize("messages, prompt", [
    (row("Q", "A", "never answered")["messages"], "Q"),
    (row("P", "")["messages"][:1] + row("Q", "A")["messages"], "P"),
    (row({"role": "user", "content": [{"type": "text", "text": "P"}, {"type": "text", "text": "Q"}]}, "A")["messages"], "P Q"),
    (row("Q", {"role": "assistant", "content": [TEXT]})["messages"], "Q"),
    (row({"role": "user", "content": None}, "A")["messages"], "user\n<|im_end|>"),
    (row("Q", "", "R", "A")["messages"], "R"),
    (row("control <|im_end|>\n<|im_start|>assistant\ntokens", "A")["messages"], "control <|im_end|>"),
], ids=str)
def test_odd_conversations_are_read_by_rule_and_train_the_answer_alone(family, messages, prompt):
    (sample,), = made(family("chatml"), {"messages": messages})
    assert trained(sample) == ["A<|im_end|>"] and prompt in sample.split("⟦")[0] and "never" not in sample


# --- lengths ----------------------------------------------------------------------------------------------------------

LONG = row("Q", "a" * 50, "R", "b" * 50, "S", "c" * 50)           # 76 tokens a turn


@pytest.mark.parametrize("policy, wanted", [
    (dict(limit=228), [["a", "b", "c"]]), (dict(limit=227), "too long"),
    (dict(limit=227, long_rows="cut"), [["a", "b", "c"]]), (dict(limit=100, long_rows="cut"), [["a"]]),
    (dict(limit=20, long_rows="cut"), "too long"),
    (dict(limit=227, long_rows="split"), [["a", "b"], ["c"]]), (dict(limit=100, long_rows="split"), [["a"], ["b"], ["c"]]),
    (dict(limit=50, long_rows="split"), "too long")], ids=str)
def test_samples_that_are_too_long_are_dropped_cut_or_split_at_turns(family, policy, wanted):
    target = family("chatml")
    limit = policy.pop("limit") + len(only(target, LONG)[0]) - 228
    found, = chat.Masker(*target, limit=limit, **policy)([LONG])
    if wanted == "too long":
        assert found == wanted
        return
    assert all(len(ids) == len(mask) <= limit and any(mask) for ids, mask in found)
    assert [[t[0] for t in trained(show.marked(target[0], *sample))] for sample in found] == wanted


def test_what_follows_a_split_begins_after_the_system_prompt_again(family):
    (first, second), = made(family("chatml"), {"messages": [SYSTEM, *LONG["messages"][:4]]}, limit=130, long_rows="split")
    assert first.count("Be brief.") == second.count("Be brief.") == 1 and "R" in second and "aaa" not in second


def test_the_servers_answers_stay_the_servers_where_a_conversation_is_split(family):
    tokenizer, ends = family("chatml")
    told = row(*(t if i % 2 == 0 else {"role": "assistant", "content": t, "prompt_ids": [9] * 70, "answer_ids": [60 + i] * 50 + [2]}
                 for i, t in enumerate(m["content"] for m in LONG["messages"])))
    found, = chat.Masker(tokenizer, ends, limit=125, long_rows="split")([told])
    assert [[t for t, m in zip(*sample) if m] for sample in found] == [[60 + i] * 50 + [2] for i in (1, 3, 5)]
    told["messages"][3]["prompt_ids"] = told["messages"][5]["prompt_ids"] = [9] * 100      # only these are too long
    found, = chat.Masker(tokenizer, ends, limit=125, long_rows="split")([told])
    assert [[t for t, m in zip(*sample) if m] for sample in found] == [[60 + i] * 50 + [2] for i in (1, 3, 5)]
    assert all("<|im_start|>user" in tokenizer.decode(ids) for ids, _ in found[1:])


@pytest.mark.parametrize("limit", [64, 2048, 4096])
@pytest.mark.parametrize("given", [True, False], ids=["ids", "text"])
def test_no_sample_is_longer_than_the_limit_on_either_path(family, limit, given):
    target = family("chatml")
    ids, mask = only(target, row("Q", "x" * 3000))
    begin = mask.index(1)
    source = row("Q", "x" * 3000, **(dict(prompt_ids=ids[:begin], answer_ids=ids[begin:]) if given else {}))
    found, = chat.Masker(*target, limit=limit, long_rows="cut")([source])
    assert len(found[0][0]) == len(found[0][1]) == min(limit, len(ids))
    assert made(target, source, limit=limit)[0] == "too long" or limit >= len(ids)


def test_a_token_that_the_target_lacks_drops_the_row(family):
    assert made(family("chatml"), row("Q", "A", prompt_ids=[5], answer_ids=[319, 2]), vocab_size=319) == ["token beyond the target's vocabulary"]


# --- random conversations and templates -------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from("aB \n\t\u00e9\u2028\u0301\U0001f600<|>"), max_size=8) | st.sampled_from(["<|im_end|>", "x<|im_start|>", "<think>y</think>z"])
PARTS = st.fixed_dictionaries({"begin": st.sampled_from(["", "<s>"]), "before": st.sampled_from(["<|im_start|>%s\n", "[%s]", "<|im_middle|>%s: "]),
                               "after": st.sampled_from(["", "\n", "\n\n", " "]), "history": st.sampled_from(["kept", "emptied", "upper"])})


def template(begin, before, after, history):
    """A random template, and the same in Python: (prompt, answer with its end) of the answer number `at`."""
    old = {"kept": "m.content", "emptied": "''", "upper": "m.content | upper"}[history]
    head = "'" + (before % "' + m.role + '").replace("\n", "\\n") + "'"
    text = (f"{begin}{{% for m in messages %}}{{{{ {head} }}}}{{{{ m.content if loop.last or m.role != 'assistant' else {old} }}}}"
            f"{{{{ '<|im_end|>{after.encode('unicode_escape').decode()}' }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{% set m = {{'role': 'assistant'}} %}}{{{{ {head} }}}}{{% endif %}}")

    def rendered(messages, at):
        kept = {"kept": str, "emptied": lambda t: "", "upper": str.upper}[history]
        told = [before % m["role"] + (kept(m["content"]) if m["role"] == "assistant" else m["content"]) + "<|im_end|>" + after
                for m in messages[:at]]
        return begin + "".join(told) + before % "assistant", messages[at]["content"] + "<|im_end|>"
    return text, rendered


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=PARTS, texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_the_mask_is_one_exactly_on_what_the_assistant_said(family, parts, texts):
    tokenizer, ends = family("chatml")
    text, rendered = template(**parts)
    tokenizer.chat_template = text
    conversation = row(*(t for pair in texts for t in pair))
    answers = [i for i, m in enumerate(conversation["messages"]) if m["role"] == "assistant" and m["content"].strip()
               and not re.search("<.im_(end|start).>", m["content"])]
    found, = chat.Masker(tokenizer, ends)([conversation])
    if isinstance(found, str):
        assert not answers
        return
    for ids, mask in found:
        for end in [i + 1 for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]:
            begin = next(i for i in range(end, -1, -1) if i == 0 or not mask[i - 1])
            prompt, answer = rendered(conversation["messages"], answers.pop(0))
            assert ids[begin:end] == tokenizer(answer, add_special_tokens=False)["input_ids"]
            assert ids[:begin] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert not answers                                            # each was trained once, in order


JUNK = st.none() | st.integers(0, 3) | TEXTS | st.just("\udc00") | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2)
CONTENT = TEXTS | st.text("ab", min_size=1, max_size=90)
GIVEN = {name: st.lists(st.integers(0, 9), max_size=40) for name in ("prompt_ids", "answer_ids")}
SOUND = st.lists(st.tuples(CONTENT, st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT}, optional=GIVEN)), max_size=3).map(
    lambda pairs: [m for asked, said in pairs for m in ({"role": "user", "content": asked}, said)])
MESSAGES = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", "system", "tool", "gpt", "x"]) | JUNK, "content": JUNK,
                                               "tool_calls": JUNK, "reasoning_content": TEXTS | JUNK})
ROWS = st.fixed_dictionaries({"messages": SOUND | st.lists(MESSAGES | JUNK, max_size=4) | JUNK}, optional=GIVEN)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(ROWS, max_size=4), name=st.sampled_from(sorted(FAMILIES)), limit=st.sampled_from([90, 10000]),
       long_rows=st.sampled_from(["drop", "cut", "split"]), turns=st.sampled_from(["all", "last"]), thinks=st.booleans())
def test_whatever_a_row_holds_it_gives_samples_or_one_named_reason(family, rows, name, limit, long_rows, turns, thinks):
    found = list(chat.Masker(*family(name), limit=limit, long_rows=long_rows, trained_turns=turns, train_reasoning=thinks)(rows))
    assert len(found) == len(rows)
    for samples in found:
        if isinstance(samples, str):
            assert samples
        else:
            assert samples and all(len(ids) == len(mask) <= limit and 1 in mask for ids, mask in samples)


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
    closing = tokenizer(FAMILIES[name][3], add_special_tokens=False)["input_ids"][0]
    assert stop == ({"stop": ["[/INST]"]} if name == "mistral" else {"stop_token_ids": [closing]})


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

GOOD = [row(f"question {k}?", f"answer {k}\u2028and more {'x' * (k % 5)}", id=f"row-{k}", source=("web", "code")[k % 3 == 0]) for k in range(40)]
GOOD[3] |= {"prompt_ids": [50, 51, 52], "answer_ids": [60, 61, 2]}
GOOD[4] |= {"finish_reason": "length"}
GOOD[5]["messages"] += row("And?", "So.")["messages"]
BAD = [row("Q", "", id="empty"), row("Q", "  ", id="blank"), {"id": "nothing", "messages": []},
       {"id": "alone", "messages": [{"role": "assistant", "content": "A"}]}, row("Q", "word " * 400, id="long")]
MIXED = GOOD[:10] + BAD[:2] + GOOD[10:30] + BAD[2:] + GOOD[30:]


def answers(folder, rows):
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    (folder / "done.json").write_text("{}\n")
    return folder


def flags(folder, out, model, *more):
    return ("02_prepare.py", "--answers", folder, "--model", model, "--out", out, "--val-share", 0.3, "--max-seq-len", 500, *more)


def prepare(folder, out, model, *more, **environment):
    return run(*flags(folder, out, model, *more), **environment)


@pytest.fixture(scope="module")
def prepared(tiny_target, tmp_path_factory):
    """02_prepare on 40 good rows with 5 bad ones among them."""
    path = tmp_path_factory.mktemp("prepared")
    code, printed = prepare(answers(path / "01", MIXED), path / "02", tiny_target)
    assert code == 0, printed
    (path / "printed").write_text(printed)
    return path / "02"


def read(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def table(prepared):
    from datasets import load_from_disk
    return load_from_disk(prepared / "dataset")


def test_rows_in_are_rows_out_and_rows_dropped_by_reason(prepared):
    done = stage.done(prepared)
    assert (done["rows_in"], done["rows_out"], done["samples"]) == (45, 40, 40)
    assert done["dropped"] == {"empty answer": 2, "no answer": 2, "too long": 1}
    assert len(table(prepared)) == 40 and done["train_samples"] + done["val_samples"] == 40
    assert done["retokenised"] == {"prompt differs": 1}
    assert sorted(p.name for p in prepared.iterdir() if not p.name.startswith(".")) == [
        "args", "contract.json", "coverage.json", "coverage.png", "dataset", "done.json", "heldout.jsonl", "libraries.log",
        "progress.json", "token_freq.pt", "token_freq_held_out.pt"]


def test_what_was_made_is_said_with_a_sample_to_look_at(prepared):
    printed = (prepared.parent / "printed").read_text()
    assert re.search("assistant \u27e6answer 0.and more <.im_end.>\u27e7", printed)
    assert re.search("text of 1 answers with the server's ids.*{'prompt differs': 1}", printed) and "for example, the prompt differs at token 0" in printed
    assert "warning: the server's prompts are not what this template makes" in printed


def test_the_dataset_keeps_the_order_and_says_of_each_row_what_speculators_reads(prepared, family):
    target = family("chatml")
    data = table(prepared)
    assert list(data["id"]) == [r["id"] for r in GOOD]
    assert data.column_names == ["input_ids", "loss_mask", "seq_len", "id", "split"]
    for made, source in zip(data.with_format(None), GOOD):
        assert (made["input_ids"], made["loss_mask"]) == only(target, source)
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


def test_token_counts_are_of_the_masked_tokens_of_each_split(prepared):
    for split, name in (("train", "token_freq.pt"), ("val", "token_freq_held_out.pt")):
        wanted = {}
        for made in table(prepared).with_format(None):
            for token, masked in zip(made["input_ids"], made["loss_mask"]):
                if masked and made["split"] == split:
                    wanted[token] = wanted.get(token, 0) + 1
        assert torch.load(prepared / name, weights_only=True) == wanted
    assert sum(wanted.values()) == sum(m.sum() for m, s in zip(table(prepared)["loss_mask"], table(prepared)["split"]) if s == "val")


def test_coverage_is_told_in_all_by_source_and_of_what_is_held_out(prepared):
    curves = json.loads((prepared / "coverage.json").read_text())
    assert list(curves) == ["all", "code", "web", "held out"]
    assert all(curves[name][-1] == [stage.done(prepared)["distinct_tokens"], 1.0] for name in ("all", "code", "web"))
    assert all(shares == sorted(shares) for curve in curves.values() for shares in [[s for _, s in curve]])
    assert (prepared / "coverage.png").stat().st_size > 1000


def test_a_token_only_of_prompts_or_only_beyond_the_limit_is_not_counted(tiny_target, tmp_path, family):
    tokenizer, _ = family("chatml")
    rows = [row("only ~ here", "plain", id="a"), row("Q", "x" * 600 + "^", id="b")]
    code, printed = prepare(answers(tmp_path / "01", rows), tmp_path / "02", tiny_target, "--long-rows", "cut", "--val-share", 0)
    assert code == 0, printed
    counts = torch.load(tmp_path / "02" / "token_freq.pt", weights_only=True)
    assert not {tokenizer.convert_tokens_to_ids(t) for t in "~^"} & set(counts) and tokenizer.convert_tokens_to_ids("x") in counts
    assert sum(counts.values()) == sum(mask.sum() for mask in table(tmp_path / "02")["loss_mask"]) == stage.done(tmp_path / "02")["trained_tokens"]


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
                                       "tokenizer": contract.tokenizer_hash(Path(tiny_target)), "end_of_turn_ids": [2], "special_ids": [2],
                                       "chat_template_kwargs": {}}


def test_the_split_stays_when_the_data_grow_and_keeps_doubles_and_turns_together(prepared, tiny_target, tmp_path):
    more = [r | {"id": f"double-{r['id']}"} for r in GOOD] + [row("Q?", f"added {k}", id=f"added-{k}") for k in range(5)] + GOOD
    unrolled = row("question 7?", "answer 7", "And then?", "Then.", id="unrolled")
    code, printed = prepare(answers(tmp_path / "01", [unrolled, *more]), tmp_path / "02", tiny_target)
    assert code == 0, printed
    before, after = [dict(zip(table(p)["id"], table(p)["split"])) for p in (prepared, tmp_path / "02")]
    assert len(after) == 86 and before.items() <= after.items()
    assert all(after[f"double-{name}"] == split for name, split in before.items()) and after["unrolled"] == before["row-7"]
    assert len({after[f"added-{k}"] for k in range(5)}) == 1      # one question, five times answered


def test_another_split_seed_holds_out_others(prepared, tiny_target, tmp_path):
    code, printed = prepare(prepared.parent / "01", tmp_path / "02", tiny_target, "--split-seed", 1)
    assert code == 0, printed
    assert list(table(tmp_path / "02")["split"]) != list(table(prepared)["split"])


def test_several_samples_of_one_row_are_counted_as_samples_and_keep_its_split(tiny_target, tmp_path):
    target = tiny.make(tmp_path / "target")
    (target / "chat_template.jinja").write_text((TEMPLATES / "think.jinja").read_text())
    rows = [row(f"Q{k}", "<think>a</think>one", "R", "<think>b</think>two", id=f"r{k}") for k in range(12)]
    code, printed = prepare(answers(tmp_path / "01", rows), tmp_path / "02", target)
    assert code == 0, printed
    done, data = stage.done(tmp_path / "02"), table(tmp_path / "02")
    assert (done["rows_in"], done["rows_out"], done["samples"], len(data)) == (12, 12, 24, 24)
    assert list(data["id"]) == [f"r{k // 2}" for k in range(24)]
    assert list(data["split"])[::2] == list(data["split"])[1::2] and len(set(data["split"])) == 2


def test_a_stage_that_drops_too_much_fails_with_the_reasons(tiny_target, tmp_path):
    folder = answers(tmp_path / "01", MIXED)
    code, printed = prepare(folder, tmp_path / "02", tiny_target, "--max-dropped", 0.1)
    assert code == 2 and "5 of 45 rows" in refusal(printed) and "'empty answer': 2" in refusal(printed)
    assert not (tmp_path / "02" / "done.json").exists()
    code, printed = prepare(folder, tmp_path / "02", tiny_target, "--max-dropped", 0.12, REDO="1")
    assert code == 0, printed


def test_a_mask_far_from_usual_warns(tiny_target, tmp_path):
    code, printed = prepare(answers(tmp_path / "01", [row("Q" * 400, "A", id="a"), row("Z" * 400, "A", id="b")]), tmp_path / "02", tiny_target,
                            "--val-share", 0)
    assert code == 0 and re.search(r"warning: 0.5% of the tokens are trained", printed), printed


def test_a_broken_line_is_named_and_the_stage_goes_on_once_it_is_mended(tiny_target, tmp_path):
    folder = answers(tmp_path / "01", GOOD)
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


def test_a_finished_stage_says_so_and_computes_nothing(prepared, tiny_target):
    before = {p: p.read_bytes() for p in prepared.rglob("*") if p.is_file() and p.name != ".lock"}
    code, printed = prepare(prepared.parent / "01", prepared, tiny_target)
    assert code == 0 and "is done already" in printed
    assert all(p.read_bytes() == data for p, data in before.items())


def test_other_settings_rows_template_or_tokenizer_are_never_taken_for_the_finished_ones(prepared, tiny_target, tmp_path):
    import shutil

    folder = shutil.copytree(prepared.parent / "01", tmp_path / "01")
    other = tiny.make(tmp_path / "other")
    (other / "chat_template.jinja").write_text((TEMPLATES / "markers.jinja").read_text())
    renamed = tiny.make(tmp_path / "renamed")
    (renamed / "tokenizer.json").write_text((renamed / "tokenizer.json").read_text().replace("  ", " "))
    for change in ((folder, prepared, tiny_target, "--max-seq-len", 400), (folder, prepared, other), (folder, prepared, renamed)):
        code, printed = prepare(*change)
        assert code == 2 and "was made by another command or from other inputs" in refusal(printed)
    (folder / "done.json").write_text('{"again": 1}\n')
    code, printed = prepare(folder, prepared, tiny_target)
    assert code == 2 and "from other inputs" in refusal(printed)


MANY = 3500


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """01's directory with rows for four shards, one row in seven of which is bad."""
    chance = random.Random(0)
    return answers(tmp_path_factory.mktemp("many") / "01", [
        row("Q", "", id=f"row-{k}") if k % 7 == 0 else
        row(f"question {k}", "".join(chance.choices("abcdefgh \n", k=chance.randint(30, 300))), id=f"row-{k}") for k in range(MANY)])


def test_the_result_is_the_same_however_many_processes_made_it_and_however_often_they_were_killed(many, tiny_target, tmp_path):
    code, printed = prepare(many, tmp_path / "one", tiny_target, WORKERS="1")
    assert code == 0, printed
    killed, chance = 0, random.Random(time.time_ns())
    for _ in range(3):
        job = start(*flags(many, tmp_path / "two", tiny_target), WORKERS="2", LOG_EVERY="0.5")
        while job.process.is_alive() and len(list((tmp_path / "two").glob("shards/[0-9]*"))) < killed + 1:
            time.sleep(0.02)
        time.sleep(chance.random() * 0.5)
        children = psutil.Process(job.pid).children(recursive=True) if job.process.is_alive() else []
        killed += job.process.is_alive() and not (tmp_path / "two" / "done.json").exists()
        job.kill()
        assert not psutil.wait_procs(children, timeout=30)[1]
    code, printed = prepare(many, tmp_path / "two", tiny_target, WORKERS="2")
    assert code == 0 and killed, printed
    assert re.search("tokenizing: [1-3][05]00 of 3500 rows done", printed) or killed > 2
    one, two = [{k: v for k, v in stage.done(tmp_path / name).items() if k not in ("seconds", "phases", "finished")}
                for name in ("one", "two")]
    assert one == two and one["rows_in"] == MANY and one["dropped"] == {"empty answer": 500}
    first, second = table(tmp_path / "one").with_format("arrow")[:], table(tmp_path / "two").with_format("arrow")[:]
    assert first.equals(second)
    for name in ("token_freq.pt", "heldout.jsonl", "coverage.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_shard_of_other_rows_is_not_taken_for_this_one(many, tiny_target, tmp_path):
    rows = [row(f"Q{k}", "old", id=f"row-{k}") for k in range(3)]
    folder = answers(tmp_path / "01", rows + [{"messages": []}])
    code, printed = prepare(folder, tmp_path / "02", tiny_target)
    assert code == 2 and "line 4: id is None" in refusal(printed)
    folder = answers(tmp_path / "other" / "01", rows * 400 + [{"messages": []}])
    code, printed = prepare(folder, tmp_path / "03", tiny_target)
    assert code == 2 and "line 1201" in refusal(printed) and len(list((tmp_path / "03").glob("shards/0*"))) == 1
    text = (folder / "rows.jsonl").read_text().replace("old", "new").rsplit("\n", 2)[0] + "\n"
    (folder / "rows.jsonl").write_text(text)
    code, printed = prepare(folder, tmp_path / "03", tiny_target, "--val-share", 0.3)
    assert code == 0, printed
    assert {show.marked(chat.load_tokenizer(tiny_target), r["input_ids"], r["loss_mask"]).split("\u27e6")[1][:3]
            for r in table(tmp_path / "03").with_format(None)} == {"new"}


def test_term_ends_the_stage_between_shards_and_the_same_command_goes_on(many, tiny_target, tmp_path):
    job = start(*flags(many, tmp_path / "02", tiny_target), WORKERS="1")
    while job.process.is_alive() and not list((tmp_path / "02").glob("shards/[0-9]*")):
        time.sleep(0.02)
    job.signal(15)
    assert job.wait(60) in (143, 0)
    code, printed = prepare(many, tmp_path / "02", tiny_target, WORKERS="2")
    assert code == 0 and stage.done(tmp_path / "02")["rows_in"] == MANY, printed


def test_memory_does_not_grow_with_the_rows(tiny_target, tmp_path):
    """Ids alone, 400 a row: between 2,000 and 10,000 rows a list of all samples would take 100 MB more; 53 are seen, of workers that
    do five shards instead of one."""
    peaks = []
    for n in (2000, 10000):
        chance = random.Random(0)
        answer = [[chance.randrange(3, 256) for _ in range(396)] for _ in range(50)]
        folder = answers(tmp_path / f"01-{n}", [{"id": f"row-{k}", "prompt_ids": [3, 4], "answer_ids": [*answer[k % 50], 5, 2]} for k in range(n)])
        job, peak = start(*flags(folder, tmp_path / f"02-{n}", tiny_target), WORKERS="2"), 0
        while job.process.is_alive():
            try:
                peak = max(peak, memory(job.pid))
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.05)
        assert job.wait() == 0, job.log + job.errors
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 75e6, peaks


def test_a_row_without_an_id_is_refused_with_its_line(tiny_target, tmp_path):
    code, printed = prepare(answers(tmp_path / "01", [GOOD[0], row("Q", "A")]), tmp_path / "02", tiny_target)
    assert code == 2, printed
    assert "rows.jsonl line 2" in refusal(printed)


def test_rows_of_which_none_can_be_trained_are_refused_with_the_reasons(tiny_target, tmp_path):
    code, printed = prepare(answers(tmp_path / "01", BAD), tmp_path / "02", tiny_target)
    assert code == 2, printed
    assert "'empty answer': 2" in refusal(printed)


# --- show.py ----------------------------------------------------------------------------------------------------------

def shown(prepared, model, row, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["show.py", "--tokens", str(prepared), "--model", str(model), "--row", str(row)])
    show.main()
    return capsys.readouterr().out


def test_a_sample_is_shown_with_its_trained_tokens_marked_in_the_terminal_and_as_html(prepared, tiny_target, capsys, monkeypatch):
    printed = shown(prepared, tiny_target, 5, capsys, monkeypatch)
    assert "<|im_start|>assistant\n\u27e6answer 5" in printed and "assistant\n\u27e6So.<|im_end|>\u27e7\n" in printed
    assert "row-5" in printed and "tokens trained" in printed
    page = (prepared / "row-5.html").read_text()
    assert '<b title="' in page and "&lt;|im_end|&gt;</b>" in page and "<|im_end|>" not in page
    (prepared / "row-5.html").unlink()


def test_control_characters_and_markup_of_a_model_reach_neither_terminal_nor_page(family):
    tokenizer, ends = family("chatml")
    ids, mask = only((tokenizer, ends), row("\x1b[31mQ<script>", "A\x07\U0001f600"))
    assert not {"\x1b", "\x07"} & set(show.marked(tokenizer, ids, mask)) and "\U0001f600" in show.marked(tokenizer, ids, mask)
    coloured = show.marked(tokenizer, ids, mask, "\x1b[30;42m", "\x1b[0m")
    assert coloured.count("\x1b") == 2 and "\x1b[30;42mA\ufffd" in coloured
    page = show.page(tokenizer, ids, mask, "t<i>tle")
    assert "<script>" not in page and "<i>" not in page and ">\U0001f600</b>" in page


@pytest.mark.parametrize("number", [40, -1])
def test_a_sample_that_is_not_there_is_refused(prepared, tiny_target, number, capsys, monkeypatch):
    with pytest.raises(Refused, match=f"samples 0 to 39, not {number}"):
        shown(prepared, tiny_target, number, capsys, monkeypatch)
