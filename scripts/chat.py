"""Conversations to token ids and loss mask, by the target's own tokenizer and chat template."""
import hashlib
import os

from stage import Refused

MARK = "eaglet7user7turn"  # stands for a user's text while the template is taken apart; no template or tokenizer knows it


class Dropped(Exception):
    """This row can't be trained on; the reason is counted in done.json."""


def load_tokenizer(model):
    """The target's tokenizer; Refused if it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=os.environ.get("TRUST_REMOTE_CODE") == "1")
    except (OSError, ValueError) as error:
        raise Refused(f"{model}: no tokenizer could be loaded ({str(error).splitlines()[0]})") from None
    if not tokenizer.chat_template:
        raise Refused(f"{model}: the tokenizer has no chat template")
    return tokenizer


def template_hash(tokenizer):
    return hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()[:16]


def end_of_turn_ids(tokenizer, model):
    """Ids that end an answer: the tokenizer's and the generation config's end-of-sequence tokens."""
    from transformers import AutoConfig, GenerationConfig

    ids = {tokenizer.eos_token_id}
    for read in (GenerationConfig.from_pretrained, AutoConfig.from_pretrained):
        try:
            found = getattr(read(model), "eos_token_id", None)
        except OSError:
            continue
        ids.update(found if isinstance(found, list) else [found])
    return ids - {None}


def question(row, where):
    """The messages that a row of prompts asks with: {"messages"} without trailing answers, or {"prompt"}; Refused else."""
    messages = row.get("messages") if "messages" in row else [{"role": "user", "content": row.get("prompt")}]
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        content = messages[-1].get("content") if messages else None
        if isinstance(content, list) and content or isinstance(content, str) and content.strip():
            return messages
    raise Refused(f'{where}: wanted {{"messages": [...]}} that ask something, or {{"prompt": "..."}}')


def render(tokenizer, messages, answer_next, tokenize=True):
    """Ids [T] (or the text) of a conversation by the chat template; with `answer_next` it ends where the assistant begins."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, tokenize=tokenize, return_dict=False)
    except Exception as error:  # jinja raises what the template's author chose
        raise Dropped("chat template failed") from error


def sample(tokenizer, row, end_ids):
    """(ids [T], mask [T]) of one answered row: mask 1 on the answer and its end-of-turn token, 0 on the prompt.

    Where the row holds the ids that the server saw and produced, these are used; else the conversation is rendered
    with and without its last answer, and the first must begin with the second.  A cut answer gets no end of turn.
    """
    if row.get("prompt_ids") and row.get("answer_ids"):
        prompt, answer = list(row["prompt_ids"]), list(row["answer_ids"])
    else:
        messages = row.get("messages") or []
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise Dropped("no answer")
        text = messages[-1].get("content") or ""
        if not isinstance(text, str):
            raise Dropped("answer is no text")
        if not text.strip():
            raise Dropped("empty answer")
        asked, said = (render(tokenizer, m, next_, tokenize=False) for m, next_ in ((messages[:-1], True), (messages, False)))
        if text.strip() not in said[len(asked):]:
            raise Dropped("template rewrites the answer" if said.startswith(asked) else "template rewrites history")
        prompt = render(tokenizer, messages[:-1], answer_next=True)
        whole = render(tokenizer, messages, answer_next=False)
        if whole[:len(prompt)] != prompt:
            raise Dropped("template rewrites history")
        answer = whole[len(prompt):]
        end = next((i for i, t in enumerate(answer) if t in end_ids), None)
        if row.get("finish_reason") == "length":
            answer = answer[:end]  # the template closes every turn; the model did not close this one
        elif end is not None:
            answer = answer[:end + 1]
    if not [t for t in answer if t not in end_ids]:
        raise Dropped("empty answer")
    return prompt + answer, [0] * len(prompt) + [1] * len(answer)


def user_turn(tokenizer):
    """How the template opens a user's turn and what closes it: (ids [T] before the user's text, ids or text after it).

    Source: Magpie (arXiv 2406.08464): a chat model that is given only the opening of a user turn invents the user.
    Returns (prefix_ids, stop): stop is {"stop_token_ids": [...]} where a special token closes the turn, else {"stop": [text]}.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True)
    before, mark, after = text.partition(MARK)
    if not mark:
        raise Refused("the chat template does not render a user turn, so no question can be invented: give --prompts FILE")
    prefix = tokenizer(before, add_special_tokens=False)["input_ids"]
    closing = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    if closing and closing[0] in special:
        return prefix, {"stop_token_ids": [closing[0]]}
    if after.strip():
        return prefix, {"stop": [after.strip().split("\n")[0]]}
    raise Refused("the chat template does not close a user turn, so an invented question would never end: give --prompts FILE")


def looping(tokens):
    """Whether a sequence (ids or words) goes round in circles: of its 4-grams fewer than half are distinct.

    Only sequences of 24 and more can tell.  On SmolLM2-135M this catches greedy answers that repeat a sentence or count
    on for ever; prose and code stay above 0.8.
    """
    grams = list(zip(*(tokens[k:] for k in range(4))))
    return len(tokens) >= 24 and len(set(grams)) < len(grams) / 2
