"""Conversations in which every answer is the target's own: what is asked, what a reply is worth, which row comes of it."""
import functools
import hashlib
import json

from api import Again, Api, Rejected
from chat import ASKED_WITH, REASONING, TOLD, looping
from ledger import TOKENS
from stage import Refused


def fields(text):
    """{"a": {"b": 1}, "c": "x"} of a.b=1,c=x."""
    found = {}
    for path, value in (pair.split("=", 1) for pair in text.split(",")):
        *above, name = path.split(".")
        try:
            value = json.loads(value)
        except ValueError:
            pass
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), above, found)[name] = value
    return found


class Asker:
    """asker(prompt): its row, in as many requests as it lacks answers; each is noted in the ledger.

    body: fields of every request; temperatures: one each by the id's hash; named: as the replies call the model.
    """

    def __init__(self, api, ledger, body, temperatures, named):
        self.api, self.ledger, self.temperatures, self.named = api, ledger, temperatures, named
        base = Api(api.url.removesuffix("/v1"), api.key)
        tells = base.has("/get_model_info") or base.has("/version")  # SGLang and vLLM say which ids they saw and produced
        self.body = body | ({"return_token_ids": True, "return_prompt_token_ids": True} if tells else {})
        self.unsent = TOLD if tells else (*TOLD, "reasoning_content")  # hosted APIs refuse it; else the template decides

    def __call__(self, prompt):
        turns, failure = self.ledger.turns.setdefault(prompt["id"], []), None
        try:
            while (said := conversation(prompt, turns))[-1]["role"] != "assistant":
                turns.append(self._ask(prompt, said))
        except Rejected as rejected:
            failure = rejected
        return self.row(prompt, failure)

    def _ask(self, prompt, said):
        """One answer: its line in the ledger."""
        share = int(hashlib.sha256(prompt["id"].encode(errors="replace")).hexdigest(), 16) % len(self.temperatures)
        body = {**self.body, "messages": [{k: v for k, v in message.items() if k not in self.unsent} for message in said],
                "temperature": self.temperatures[share], **{k: prompt[k] for k in ASKED_WITH if k in prompt}}
        self.api.pace.wait()
        asked, came = self.ledger.ask(prompt["id"], len(json.dumps(body)), body["max_tokens"]), {}
        try:
            reply = self.api.once("/chat/completions", body)
        except (Again, Refused) as failure:
            self.ledger.lose() if getattr(failure, "lost", False) else self.ledger.end(asked)
            raise
        try:
            came["answer"] = answered(reply, self.named)
            came["by"] = {k: reply.get(k) for k in ("model", "provider")}
            came["by"] |= {k: body[k] for k in ("temperature", "top_p", "max_tokens")}
        finally:
            line = self.ledger.end(asked, reply["usage"], **came)
        return line

    def row(self, prompt, failure=None):
        """For rows.jsonl, or without any answer for rejected.jsonl."""
        turns = self.ledger.turns[prompt["id"]]
        if not turns:
            return {"id": prompt["id"], "reason": failure.reason, **({"detail": failure.detail} if failure.detail else {})}
        said = conversation(prompt, turns)
        while said[-1]["role"] != "assistant":  # a later turn failed: the row ends with the answer before it
            said.pop()
        *said, last = said
        costs, usage = [turn["cost"] for turn in turns if turn["cost"] is not None], turns[-1]["usage"]
        row = {**prompt, "messages": [*said, {k: v for k, v in last.items() if k not in TOLD}],
               **{k: last[k] for k in TOLD if k in last}, **turns[-1]["by"],
               "usage": usage | {k: sum(turn["usage"].get(k) or 0 for turn in turns) for k in TOKENS if k in usage}}
        if costs:
            row["cost"] = sum(costs)
        if sum(m["role"] != "assistant" for m in said) < sum(m["role"] != "assistant" for m in prompt["messages"]):
            row["ended"] = failure.reason if failure else "early"
        return row


def conversation(prompt, turns):
    """A prompt's messages with the new answers in place of the old, up to the next answer that lacks.

    It ends early, after an answer that was cut (nobody would go on from there), or one that calls other functions than the
    old one did, to which the recorded results would be no reply.  What the assistant says before anybody else stays.
    """
    said, left, renamed = [], [turn["answer"] for turn in turns], {}
    for message in [*prompt["messages"], {"role": "assistant"}]:
        if message["role"] == "tool" and message.get("tool_call_id") in renamed:
            message = {**message, "tool_call_id": renamed[message["tool_call_id"]]}
        elif message["role"] == "assistant" and any(m["role"] in ("user", "tool") for m in said):
            if said[-1]["role"] == "assistant":
                continue
            if not left:
                return said
            old, message = message, left.pop(0)
            if message["finish_reason"] == "length" or functions(old) != functions(message):
                return [*said, message]
            renamed = {a.get("id"): b.get("id") for a, b in zip(old.get("tool_calls") or [], message.get("tool_calls") or [])}
        said.append(message)
    return said


def functions(message):
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def answered(reply, named):
    """The message of a reply: content, reasoning_content, tool_calls, and TOLD; Rejected where it is nothing to train on.

    Policies: a cut answer is kept as cut (02 closes it with nothing).  Rejected: an empty one; one that is all reasoning
    (raise --answer-tokens); what a filter stopped or the provider broke off; what another model than `named` answered; one
    that goes round in circles.
    """
    if not reply.get("choices"):
        raise Rejected("no choices")
    try:
        choice = reply["choices"][0]
        message, finish = choice["message"], choice.get("finish_reason")
        text, calls = message.get("content") or "", message.get("tool_calls") or []
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        told = {"finish_reason": finish, "prompt_ids": choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
                "answer_ids": choice.get("response_token_ids") or choice.get("token_ids")}  # SGLang's and vLLM's names
        functions(message)
    except (LookupError, TypeError, AttributeError):
        raise Rejected("reply without an answer") from None
    if not isinstance(text, str) or not isinstance(reasoning, str):
        raise Rejected("answer is no text")
    if not same_model(str(reply.get("model") or named), named):
        raise Rejected("another model", str(reply["model"]))
    if finish == "content_filter":
        raise Rejected("content filter")
    if finish not in ("stop", "length", "tool_calls"):
        raise Rejected("broken off", f"finish_reason {finish}")
    for opens, closes in REASONING.items():
        thought, closed, rest = text.partition(closes)
        if closed or text.lstrip().startswith(opens):
            reasoning, text = reasoning + thought.lstrip().removeprefix(opens).strip("\n"), rest.lstrip("\n")
    if not text.strip() and not calls:
        raise Rejected("only reasoning" if reasoning.strip() else "empty answer")
    if looping(told["answer_ids"] or text.split()):
        raise Rejected("answer loops")
    return {"role": "assistant", "content": text,
            **{k: v for k, v in (("reasoning_content", reasoning), ("tool_calls", calls), *told.items()) if v}}


def same_model(answered, named):
    """Whether two names may be of one model: qwen/qwen3-8b:free, Qwen3-8B and qwen3-8b-04-28 may."""
    short = [name.lower().rstrip("/").split("/")[-1].split(":")[0] for name in (answered, named)]
    return short[0].startswith(short[1]) or short[1].startswith(short[0])
