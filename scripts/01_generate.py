"""Answer prompts with the target model, through any OpenAI-compatible API.

Example
    python scripts/01_generate.py --prompts self:200 --model models/smollm2-135m --out runs/try/01_generate
    API_KEY=... python scripts/01_generate.py --prompts prompts.jsonl --model models/qwen3-8b --out runs/q/01_generate \\
        --api https://openrouter.ai/api/v1 --api-model qwen/qwen3-8b

Reads   --prompts FILE   JSON Lines: {"id", "messages"} or {"prompt"}; a trailing answer is dropped and made anew
                 self:N  the target invents N user questions first (Magpie, arXiv 2406.08464)
        --model          the target: served by a SGLang of our own, unless --api names a server of it
Writes  prompts.jsonl    id, messages                                          what is to be answered
        rows.jsonl       id, messages (answer included), finish_reason, usage, model, temperature, and from SGLang
                         prompt_ids, answer_ids: what the server saw and produced
        rejected.jsonl   id, reason
        done.json

Resumes by id: what is in rows.jsonl or rejected.jsonl is not asked again.  CONCURRENCY (environment, default 64)
requests are in flight; the key comes from API_KEY.
"""
import argparse
import hashlib
import os
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import progress
import stage
from api import Api, Rejected, each, in_flight
from chat import load_tokenizer, looping, question, user_turn
from jsonl import Appender, read
from sglang_server import serve
from stage import Refused


def prompts_source(text):
    if not text.startswith("self:"):
        return Path(text)
    if not text[5:].isdigit() or int(text[5:]) == 0:
        raise argparse.ArgumentTypeError(f"{text}: wanted self:N with N > 0")
    return text


def temperatures(text):
    return [float(t) for t in text.split(",")]


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--prompts", type=prompts_source, required=True, help="FILE, or self:N to let the target invent N questions")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--api", default="", help="base URL of an OpenAI-compatible server (default: serve --model here)")
    p.add_argument("--api-model", default="", help="the target's name at --api")
    p.add_argument("--temperature", type=temperatures, default=[0.7],
                   help="of the answers; of a list one each, by the id's hash (default 0.7)")
    p.add_argument("--answer-tokens", type=int, default=2048, help="most tokens of an answer (default 2048)")
    p.add_argument("--question-tokens", type=int, default=64, help="most tokens of an invented question (default 64)")
    p.add_argument("--generate-dtype", default="bfloat16", help="of the server that we start (default bfloat16)")
    args = p.parse_args()
    if bool(args.api) != bool(args.api_model):
        p.error("--api and --api-model go together")
    if "@" in args.api or "?" in args.api:
        p.error("--api holds more than an address: keys and passwords belong into API_KEY, which is stored nowhere")
    return args


def main():
    args = arguments()
    out = stage.begin(args)
    if args.api:
        server = nullcontext(args.api)
    else:
        server = serve(args.model, out / "sglang.log", args.generate_dtype, max_requests=in_flight())
    tokenizer = load_tokenizer(args.model)
    if isinstance(args.prompts, Path):  # bad input is found before a server is started
        copy_prompts(args.prompts, out)
    opening = user_turn(tokenizer) if not isinstance(args.prompts, Path) else None
    with server as url:
        api = Api(url if args.api else url + "/v1", os.environ.get("API_KEY") if args.api else None)
        if opening:
            invent(api, args, tokenizer, opening, int(args.prompts[5:]), out)
        answer(api, args, out)
    prompts, rows, rejected = (ids(out / f"{name}.jsonl") for name in ("prompts", "rows", "rejected"))
    dropped = Counter(row["reason"] for _, row in read(out / "rejected.jsonl"))
    stage.finish(out, len(prompts | rejected), len(rows), dropped)


def copy_prompts(path, out):
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
            lines.append({"id": name, "messages": messages})
    if not lines:
        raise Refused(f"{path} holds no prompt")
    (out / "prompts.jsonl").unlink(missing_ok=True)
    with Appender(out / "prompts.jsonl") as file:
        for line in lines:
            file.write(line)


def invent(api, args, tokenizer, opening, wanted, out):
    """Let the target invent user questions until `wanted` are kept, in at most four times as many tries."""
    prefix, stop = opening
    kept, rejected = ids(out / "prompts.jsonl"), ids(out / "rejected.jsonl")
    seen = {key(row["messages"][-1]["content"]) for _, row in read(out / "prompts.jsonl")} if kept else set()
    tries = 1 + max((int(name.split("-")[1]) for name in kept | rejected if name.startswith("self-")), default=-1)
    model = args.api_model or args.model.name
    body = {"model": model, "prompt": prefix, "max_tokens": args.question_tokens, "temperature": 1.0, **stop}

    def ask(number):
        try:
            return number, api.post("/completions", body)["choices"][0]
        except Rejected as rejection:
            raise Refused(f"--prompts self:N needs raw completions, which this API does not offer ({rejection}): "
                          "give --prompts FILE") from None

    progress.phase("inventing questions", wanted, "question", done=len(kept))
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
        raise Refused(f"{args.model} invented no usable question in {tries} tries: give --prompts FILE")
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


def answer(api, args, out):
    """Answer every prompt that is neither in rows.jsonl nor in rejected.jsonl yet."""
    finished = ids(out / "rows.jsonl") | ids(out / "rejected.jsonl")
    total = len(ids(out / "prompts.jsonl"))
    waiting = [row for _, row in read(out / "prompts.jsonl") if row["id"] not in finished]
    sglang = Api(api.url.removesuffix("/v1")).has("/get_model_info")  # it alone can say which ids it saw and produced
    extra = {"return_prompt_token_ids": True, "return_token_ids": True} if sglang else {}

    def ask(prompt):
        temperature = args.temperature[int(hashlib.sha256(prompt["id"].encode()).hexdigest(), 16) % len(args.temperature)]
        try:
            reply = api.post("/chat/completions", {
                "model": args.api_model or args.model.name, "messages": prompt["messages"], "temperature": temperature,
                "top_p": 1.0, "max_tokens": args.answer_tokens, **extra})
            return prompt["id"], answered(prompt, reply, temperature), None
        except Rejected as rejection:
            return prompt["id"], None, str(rejection)

    progress.phase("answering", total, "row", done=total - len(waiting))
    tokens = rejected = 0
    with Appender(out / "rows.jsonl") as rows, Appender(out / "rejected.jsonl") as reject:
        for name, row, reason in each(ask, waiting, in_flight()):
            if reason:
                reject.write({"id": name, "reason": reason})
                rejected += 1
            else:
                rows.write(row)
                tokens += (row["usage"] or {}).get("completion_tokens") or 0
            progress.advance(answer_tokens=tokens, rejected=rejected)


def answered(prompt, reply, temperature):
    """The row of a reply; Rejected with the reason where it is no answer to train on."""
    if not reply.get("choices"):
        raise Rejected("no choices")
    try:
        choice = reply["choices"][0]
        text, finish, usage = choice["message"].get("content") or "", choice.get("finish_reason"), reply.get("usage") or {}
        prompt_ids, answer_ids = choice.get("prompt_token_ids"), choice.get("response_token_ids")
    except (LookupError, TypeError, AttributeError):
        raise Rejected("reply without an answer") from None
    if not isinstance(text, str):
        raise Rejected("answer is no text")
    if finish not in ("stop", "length"):
        raise Rejected(f"finish {finish}")
    if not text.strip():
        raise Rejected("empty answer")
    if looping(answer_ids or text.split()):
        raise Rejected("answer loops")
    row = {"id": prompt["id"], "messages": [*prompt["messages"], {"role": "assistant", "content": text}],
           "finish_reason": finish, "usage": usage, "model": reply.get("model"), "temperature": temperature}
    return {**row, "prompt_ids": prompt_ids, "answer_ids": answer_ids} if prompt_ids and answer_ids else row


def ids(path):
    """The ids in a JSON Lines file; none if there is no such file."""
    if not path.exists():
        return set()
    with Appender(path):  # repairs a line that a kill tore
        pass
    return {row["id"] for _, row in read(path)}


if __name__ == "__main__":
    stage.run(main)
