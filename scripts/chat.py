"""Conversations to token ids and loss mask, by the target's own tokenizer and chat template."""
import hashlib
import json
import os
import re
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace

from stage import Refused

MARK = "eaglet7user7turn"  # stands for a user's text while the template is taken apart; no template or tokenizer knows it
ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "developer", "user", "assistant", "tool")}
ASKED_WITH = ("tools", "chat_template_kwargs")          # what a row may hold besides messages and a server renders too
TOLD = ("prompt_ids", "answer_ids", "finish_reason")    # what a server told of an answer
# What opens and closes reasoning in a text: most models, Magistral, Kimi-VL, gpt-oss
REASONING = {"<think>": "</think>", "[THINK]": "[/THINK]", "\u25c1think\u25b7": "\u25c1/think\u25b7",
             "<|channel|>analysis": "<|channel|>final<|message|>"}


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
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16]


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


def turns_of(row):
    """What a row holds as messages, under the name that OpenAI or ShareGPT gave it."""
    return row.get("messages", row.get("conversations"))


def question(row, where):
    """The messages that a row of prompts asks with: {"messages"} without trailing answers, or {"prompt"}; Refused else."""
    messages = turns_of(row) if "prompt" not in row else [{"role": "user", "content": row["prompt"]}]
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        messages = [m if "from" not in m else {"role": ROLES.get(m["from"], m["from"]), "content": m.get("value")} for m in messages]
        for role in (m.get("role") for m in messages):
            if role not in ROLES.values():
                raise Refused(f"{where}: role {role!r}, wanted one of {', '.join(sorted({*ROLES.values()}))}")
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        content = messages[-1].get("content") if messages and messages[-1]["role"] in ("user", "tool") else None
        if isinstance(content, list) and content or isinstance(content, str) and content.strip():
            return messages
    raise Refused(f'{where}: wanted {{"messages": [...]}} that ask something, or {{"prompt": "..."}}')


def conversation(row):
    """The messages of a row as a server hands them to the template: roles by their names, parts of text joined, null
    content empty, arguments of tool calls as objects; Dropped with the reason."""
    messages = turns_of(row) or []
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Dropped("messages are no list of objects")
    return [_message(m) for m in messages]


def _message(message):
    role, content = str(message.get("role", message.get("from"))), message.get("content", message.get("value"))
    if role not in ROLES:
        raise Dropped("unknown role")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = " ".join(texts) if all(isinstance(text, str) for text in texts) else content
    if not all(isinstance(text, str | None) for text in (content, message.get("reasoning_content"), message.get("reasoning"))):
        raise Dropped("content is no text")
    kept = {k: v for k, v in message.items() if v is not None and k not in ("from", "value", *TOLD)}
    try:
        if calls := [call | {"function": {"arguments": {}} | call["function"]} for call in kept.get("tool_calls", [])]:
            for function in (call["function"] for call in calls):
                if isinstance(function["arguments"], str):
                    function["arguments"] = json.loads(function["arguments"])
            kept["tool_calls"] = calls
    except (KeyError, TypeError, ValueError):
        raise Dropped("broken tool call") from None
    return kept | {"role": ROLES[role], "content": content or ""}


def render(tokenizer, messages, answer_next, tokenize=True, **asked_with):
    """Ids [T] (or the text) of a conversation by the chat template; with `answer_next` it ends where the assistant begins."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, tokenize=tokenize, return_dict=False,
                                             tools=asked_with.get("tools"), **asked_with.get("chat_template_kwargs") or {})
    except Exception as error:  # jinja raises what the template's author chose
        raise Dropped("chat template failed") from error


@dataclass
class Turn:
    """One answer of a conversation."""
    stored: tuple | None = None     # (prompt ids, answer ids) of the server
    cut: bool = False               # the answer was cut off: nothing may close it
    opening: int = 0                # number of the message after the previous answer, where the conversation may be split
    messages: tuple = ()            # up to and with the answer
    texts: tuple = ()               # rendered up to where the assistant begins, and with the answer
    refused: str = "no text"        # why there are no texts


class Masker:
    """Conversations to samples (ids [T], mask [T]): 1 on every token that the assistant produced, its end of turn included.

    A turn whose ids the server gave (`prompt_ids`, `answer_ids`: in the row for its last message, in a message for itself)
    is taken as it is; in such a row other answers are context, for they are not the server's.  Else the template renders
    the conversation with and without the answer, and the first must begin with the second.  Turns share a sample as long
    as each prompt begins with the ids so far; where a template rewrites history the next turn begins a sample of its own.

    long_rows: a sample of more than `limit` tokens is dropped, cut, or split at turns (what follows begins afresh after
    the system prompt).  Counted in `turns`: those not trained, of rows that are; in `retokenised`: what the text of stored
    ids gives when it is rendered and tokenized again, of which `example` is the first that differs.
    """

    def __init__(self, tokenizer, end_ids, limit=1 << 30, vocab_size=1 << 30, long_rows="drop", trained_turns="all", train_reasoning=True):
        self.tokenizer, self.end_ids, self.limit, self.vocab_size = tokenizer, end_ids, limit, vocab_size
        self.long_rows, self.trained_turns, self.train_reasoning = long_rows, trained_turns, train_reasoning
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special} - {*REASONING, *REASONING.values()}
        self.control = re.compile("|".join(map(re.escape, sorted(special))) or "(?!)")
        self.turns, self.retokenised, self.example, self.ids = Counter(), Counter(), "", {}

    def __call__(self, rows):
        """Yield for each row its samples, or the reason (str) why there is none.  Texts are tokenized in one call."""
        planned = []
        for row in rows:
            try:
                planned.append([self._rendered(row, turn) for turn in self._turns(row)])
            except Dropped as reason:
                planned.append(str(reason))
        texts = list({text: 0 for turns in planned if not isinstance(turns, str) for turn in turns for text in turn.texts})
        self.ids = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else {}
        for row, turns in zip(rows, planned):
            yield turns if isinstance(turns, str) else self._samples(row, turns)

    def _turns(self, row):
        """The turns of a row that are to be trained."""
        messages, given = conversation(row), turns_of(row)
        if not messages and row.get("prompt_ids") and row.get("answer_ids"):
            return [Turn((row["prompt_ids"], row["answer_ids"]))]
        asked = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), len(messages))
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > asked]
        told = {i: given[i] | {k: row[k] for k in TOLD if k in row and i + 1 == len(messages)} for i in answers}
        stored = {i: (t["prompt_ids"], t["answer_ids"]) for i, t in told.items() if t.get("prompt_ids") and t.get("answer_ids")}
        turns = [Turn(stored.get(i), told[i].get("finish_reason") == "length", before + 1, messages[:i + 1])
                 for before, i in zip([-1, *answers], answers) if i in stored or not stored]
        if not turns:
            raise Dropped("no answer")
        self.turns["not the server's"] += len(answers) - len(turns)
        return turns[-1:] if self.trained_turns == "last" else turns

    def _rendered(self, row, turn, start=0):
        """The turn with its texts, of the conversation that begins at message `start`, after the system prompt."""
        if not turn.messages:
            return turn
        messages, answer = [m for m in turn.messages[:start] if m["role"] == "system"] + turn.messages[start:], turn.messages[-1]
        reasoning, calls = answer.get("reasoning_content", answer.get("reasoning", "")), answer.get("tool_calls", [])
        parts = [(answer["content"], "rewrites the answer"), (reasoning, "leaves out the reasoning"),
                 *((call["function"].get("name", ""), "leaves out the tool calls") for call in calls)]
        try:
            if not answer["content"].strip() and not calls:
                raise Dropped("empty answer")
            if self.control.search(answer["content"]):
                raise Dropped("control token in the answer")
            asked, said = (render(self.tokenizer, m, answer_next, tokenize=False, **{k: row.get(k) for k in ASKED_WITH})
                           for m, answer_next in ((messages[:-1], True), (messages, False)))
            if not said.startswith(asked):
                raise Dropped("template rewrites history")
            if re.search("[\ud800-\udfff]", said):
                raise Dropped("half a character")  # of a pair that JSON can hold and no tokenizer takes
            for part, problem in parts:
                if part.strip() not in said[len(asked):]:
                    raise Dropped(f"template {problem}")
            thinks, thought = (text.lstrip().startswith(tuple(REASONING)) for text in (said[len(asked):], answer["content"]))
            if thinks and not thought and not reasoning:
                raise Dropped("template invents reasoning")
            return replace(turn, texts=(asked, said))
        except Dropped as reason:
            return replace(turn, texts=(), refused=str(reason))

    def _encode(self, text):
        return self.ids[text] if text in self.ids else self.tokenizer([text], add_special_tokens=False)["input_ids"][0]

    def _tokens(self, turn):
        """(prompt, answer) as the template has it."""
        if not turn.texts:
            raise Dropped(turn.refused)
        prompt, whole = map(self._encode, turn.texts)
        answer = whole[len(prompt):]
        if whole[:len(prompt)] != prompt:  # a token lies across the boundary; the server's prompt ended there
            rest = turn.texts[1][len(turn.texts[0]):]
            answer = self._encode(rest)
            if self.tokenizer.decode(answer) != rest:
                raise Dropped("no boundary before the answer")
        end = next((i for i, t in enumerate(answer) if t in self.end_ids), None)
        if end is None:
            raise Dropped("template ends no turn")
        return prompt, answer[:end if turn.cut else end + 1]  # the template closes every turn; the model did not close a cut one

    def _exact(self, turn):
        """(prompt, answer) as the server had it, compared with what the template makes of the text."""
        prompt, answer = map(list, turn.stored)
        try:
            again = self._tokens(turn)
            found = "prompt differs" if again[0] != prompt else "answer differs" if again[1] != answer else "same"
            if found != "same" and not self.example:
                both = sum(again, []), prompt + answer
                at = len(os.path.commonprefix(both))
                near = [self.tokenizer.decode(ids[max(0, at - 4):at + 6]) for ids in both]
                self.example = f"{found} at token {at}: {near[0]!r}, of the server {near[1]!r}"
        except Dropped as reason:
            found = str(reason)
        self.retokenised[found] += 1
        return prompt, answer

    def _samples(self, row, turns):
        samples, start, dropped = [], 0, []
        for turn in turns:
            try:
                prompt, answer = self._exact(turn) if turn.stored else self._tokens(turn)
                for start in (start, turn.opening):
                    if start:
                        prompt, again = self._tokens(self._rendered(row, turn, start))
                        answer = answer if turn.stored else again
                    if self.long_rows != "split" or len(prompt) + len(answer) <= self.limit:
                        break
                mask = self._mask(prompt, answer)
            except Dropped as reason:
                dropped.append(str(reason))
                continue
            joins = samples and prompt[:len(samples[-1][0])] == samples[-1][0]
            ids, old = samples.pop() if joins else ([], [])
            samples.append((prompt + answer, old + [0] * (len(prompt) - len(ids)) + mask))
        if self.long_rows == "cut":
            self.turns["cut"] += sum(len(ids) > self.limit for ids, _ in samples)
            samples = [(ids[:self.limit], mask[:self.limit]) for ids, mask in samples]
        kept = [sample for sample in samples if len(sample[0]) <= self.limit and any(sample[1])]
        dropped += ["too long"] * (len(samples) - len(kept))
        self.turns.update(dropped if kept else ())
        return kept or dropped[-1]

    def _mask(self, prompt, answer):
        if not set(answer) - self.end_ids:
            raise Dropped("empty answer")
        if max(prompt + answer) >= self.vocab_size:
            raise Dropped("token beyond the target's vocabulary")
        if prompt[:2] == [self.tokenizer.bos_token_id] * 2:
            raise Dropped("two beginnings of text")
        skipped = 0 if self.train_reasoning else self._reasoning(prompt, answer)
        if skipped == len(answer):
            raise Dropped("only reasoning")
        return [0] * skipped + [1] * (len(answer) - skipped)

    def _reasoning(self, prompt, answer):
        """How many tokens of an answer are reasoning."""
        text = self.tokenizer.decode(answer)
        for opens, closes in REASONING.items():
            if closes in text:
                return bisect_left(range(len(answer)), True, key=lambda n: closes in self.tokenizer.decode(answer[:n]))
            if opens in text or self.tokenizer.decode(prompt[-8:]).rstrip().endswith(opens):
                return len(answer)
        return 0


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
