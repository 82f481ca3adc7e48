"""What is to be answered: the user's prompts, or questions that the target invents (Magpie, arXiv 2406.08464)."""
import hashlib
import json
import os
import re

import progress
import stage
from api import Rejected, each, in_flight
from chat import ASKED_WITH, looping, question
from jsonl import Appender, Known, read
from stage import Refused
from talks import functions


def copy(source, out):
    """prompts.jsonl from the user's file or data set, row by row: ids made where they lack, exact duplicates dropped and
    counted.  Whole or absent, so a data set that changes meanwhile does not matter."""
    if (out / "prompts.jsonl").exists():
        return
    for path in (out / ".prompts.tmp", out / "rejected.jsonl"):  # of a copy that was broken off
        path.unlink(missing_ok=True)
    names, texts, number = Known(), Known(), 0
    with Appender(out / ".prompts.tmp") as file, Appender(out / "rejected.jsonl") as reject:
        for number, where, row in rows(source):
            stage.check_stop()
            prompt = normal(row, where)
            text = hashlib.sha256(repr(prompt).encode(errors="replace")).hexdigest()[:16]
            given = row.get("id") is not None
            name = str(row["id"]) if given else text
            earlier = names.add(name, number)
            if earlier and given:
                raise Refused(f"{where}: id {name} stands in {where.split()[-2]} {earlier} too")
            if texts.add(text):
                reject.write({"id": name if given else f"{name}-{number}", "reason": "duplicate prompt"})
            else:
                file.write({"id": name, **prompt, **({"source": row["source"]} if row.get("source") else {})})
            progress.advance()
    if not number:
        raise Refused(f"{source} holds no prompt")
    os.replace(out / ".prompts.tmp", out / "prompts.jsonl")


def rows(source):
    """Yield (number, place, row) of a JSON Lines or parquet file, or a Hugging Face data set hf:NAME[:CONFIG][:SPLIT]."""
    hub = isinstance(source, str)
    if not hub and source.suffix != ".parquet":
        yield from ((number, f"{source} line {number}", row) for number, row in read(source))
        return
    from datasets import load_dataset

    name, *config = source[3:].split(":") if hub else ["parquet"]
    split = config.pop() if config else "train"
    try:
        data = load_dataset(name, *config, split=split, streaming=True, **({} if hub else {"data_files": str(source)}))
        for number, row in enumerate(data, 1):
            yield number, f"{source} row {number}", filled(row)
    except (OSError, ValueError) as error:
        hint = "; HF_HUB_OFFLINE=0 lets it be looked up" if hub and os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise Refused(f"{source} can't be read: {' '.join(str(error).split())[:200]}{hint}") from None


def filled(value):
    """Without the None that arrow writes for every key that only other rows have."""
    if isinstance(value, dict):
        return {k: filled(v) for k, v in value.items() if v is not None}
    return [filled(v) for v in value] if isinstance(value, list) else value


def normal(row, where):
    """{"messages"[, tools, chat_template_kwargs]} of a row; Refused if it asks nothing or in a broken way."""
    messages = question(row, where)
    if isinstance(row.get("system"), str) and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": row["system"]}, *messages]
    try:
        list(map(functions, messages))
        return {"messages": messages, **{k: json.loads(v) if isinstance(v, str) else v for k in ASKED_WITH if (v := row.get(k))}}
    except (LookupError, TypeError, AttributeError, ValueError):
        raise Refused(f"{where}: its tools, tool_calls or chat_template_kwargs are broken") from None


def invent(api, model, opening, wanted, question_tokens, out):
    """Let the target invent user questions until `wanted` are kept, in at most four times as many tries.

    opening: chat.user_turn's.  A try is self-<number>: kept in prompts.jsonl, or in rejected.jsonl with the reason.
    """
    prefix, stop = opening
    body = {"model": model, "prompt": prefix, "max_tokens": question_tokens, "temperature": 1.0, **stop}

    def ask(number):
        api.pace.wait()
        try:
            return number, api.once("/completions", body)["choices"][0]
        except Rejected as rejection:
            raise Refused(f"--prompts self:N needs raw completions, which this API does not offer ({rejection}): "
                          "give --prompts FILE") from None

    with Appender(out / "prompts.jsonl") as prompts, Appender(out / "rejected.jsonl") as reject:
        seen = {key(row["messages"][-1]["content"]) for _, row in read(out / "prompts.jsonl")}
        tried = [int(row["id"].split("-")[1]) for name in ("prompts.jsonl", "rejected.jsonl") for _, row in read(out / name)]
        kept, tries = len(seen), 1 + max(tried, default=-1)
        progress.phase("inventing questions", wanted, "question", done=kept, flight=in_flight())
        while kept < wanted and tries < 4 * wanted + 16:
            batch = range(tries, min(tries + wanted - kept, 4 * wanted + 16))
            tries = batch.stop
            for number, choice in each(ask, batch, api.pace):
                text = choice["text"].strip()
                reason = unusable(text, choice["finish_reason"], seen)
                if reason:
                    reject.write({"id": f"self-{number}", "reason": reason})
                else:
                    seen.add(key(text))
                    kept += 1
                    prompts.write({"id": f"self-{number}", "messages": [{"role": "user", "content": text}]})
                progress.advance(int(not reason))
    if not kept:
        raise Refused(f"{model} invented no usable question in {tries} tries: give --prompts FILE")
    if kept < wanted:
        progress.log(f"{tries} tries gave {kept} of {wanted} questions")


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
