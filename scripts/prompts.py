"""What is to be answered: the user's prompts, or questions that the target invents (Magpie, arXiv 2406.08464)."""
import hashlib
import re

import progress
from api import Rejected, each, in_flight
from chat import ASKED_WITH, looping, question
from jsonl import Appender, ids, read
from stage import Refused


def copy(path, out):
    """prompts.jsonl from the user's file: ids made where they lack, exact duplicates without an id dropped and counted."""
    seen = {}
    rejected = ids(out / "rejected.jsonl")
    lines = []
    with Appender(out / "rejected.jsonl") as reject:
        for number, row in read(path):
            messages = question(row, f"{path} line {number}")
            name = str(row["id"]) if row.get("id") is not None else hashlib.sha256(repr(messages).encode()).hexdigest()[:16]
            if name in seen and "id" in row:
                raise Refused(f"{path} line {number}: id {name} stands in line {seen[name]} too")
            if name in seen:
                if f"{name}-line{number}" not in rejected:
                    reject.write({"id": f"{name}-line{number}", "reason": "duplicate prompt"})
                continue
            seen[name] = number
            lines.append({"id": name, "messages": messages, **{k: row[k] for k in ("source", *ASKED_WITH) if k in row}})
    if not lines:
        raise Refused(f"{path} holds no prompt")
    (out / "prompts.jsonl").unlink(missing_ok=True)
    with Appender(out / "prompts.jsonl") as file:
        for line in lines:
            file.write(line)


def invent(api, model, opening, wanted, question_tokens, out):
    """Let the target invent user questions until `wanted` are kept, in at most four times as many tries.

    opening: chat.user_turn's.  A try is self-<number>: kept in prompts.jsonl, or in rejected.jsonl with the reason.
    """
    prefix, stop = opening
    kept, rejected = ids(out / "prompts.jsonl"), ids(out / "rejected.jsonl")
    seen = {key(row["messages"][-1]["content"]) for _, row in read(out / "prompts.jsonl")} if kept else set()
    tries = 1 + max((int(name.split("-")[1]) for name in kept | rejected if name.startswith("self-")), default=-1)
    body = {"model": model, "prompt": prefix, "max_tokens": question_tokens, "temperature": 1.0, **stop}

    def ask(number):
        try:
            return number, api.post("/completions", body)["choices"][0]
        except Rejected as rejection:
            raise Refused(f"--prompts self:N needs raw completions, which this API does not offer ({rejection}): "
                          "give --prompts FILE") from None

    progress.phase("inventing questions", wanted, "question", done=len(kept), flight=in_flight())
    with Appender(out / "prompts.jsonl") as prompts, Appender(out / "rejected.jsonl") as reject:
        while len(kept) < wanted and tries < 4 * wanted + 16:
            batch = range(tries, tries + max(1, min(wanted - len(kept), 4 * wanted + 16 - tries)))
            tries = batch.stop
            for number, choice in each(ask, batch, in_flight()):
                text = choice["text"].strip()
                reason = unusable(text, choice["finish_reason"], seen)
                if reason:
                    reject.write({"id": f"self-{number}", "reason": reason})
                    rejected.add(f"self-{number}")
                    progress.advance(0, dropped=len(rejected))
                else:
                    seen.add(key(text))
                    kept.add(f"self-{number}")
                    prompts.write({"id": f"self-{number}", "messages": [{"role": "user", "content": text}]})
                    progress.advance()
    if not kept:
        raise Refused(f"{model} invented no usable question in {tries} tries: give --prompts FILE")
    if len(kept) < wanted:
        progress.log(f"{tries} tries gave {len(kept)} of {wanted} questions")


def key(text):
    return re.sub(r"\W+", " ", str(text).lower()).strip()


def unusable(text, finish, seen):
    """Why an invented question is not worth answering, or None."""
    if finish == "length":
        return "question cut"
    if not text:
        return "question empty"
    if looping(text.split()):
        return "question loops"
    if len(text.split()) < 3 or "\ufffd" in text or not all(c.isprintable() or c in "\n\t" for c in text):
        return "question is junk"
    return "question duplicate" if key(text) in seen else None
