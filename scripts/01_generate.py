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
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import progress
import prompts
import stage
from api import Api, Rejected, each, in_flight
from chat import ASKED_WITH, load_tokenizer, looping, user_turn
from jsonl import Appender, ids, read
from sglang_server import serve
from stage import Refused


DOUBT = 16  # requests refused in a row that mean a wrong setting rather than wrong prompts


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
    name, opening = args.api_model or args.model.name, None
    if isinstance(args.prompts, Path):  # bad input is found before a server is started
        prompts.copy(args.prompts, out)
    else:
        opening = user_turn(load_tokenizer(args.model))
    wanted = len(ids(out / "prompts.jsonl")) if opening is None else int(args.prompts[5:])
    progress.plan("starting SGLang", ("inventing", wanted), ("answering", wanted), "stopping SGLang", rows=wanted)
    if args.api:
        server, key = nullcontext(args.api), os.environ.get("API_KEY")
    else:
        server, key = serve(args.model, stage.part_log(out, "sglang"), args.generate_dtype, max_requests=in_flight()), None
    with server as url:
        api = Api(url if args.api else url + "/v1", key)
        if opening:
            prompts.invent(api, name, opening, wanted, args.question_tokens, out)
        answer(api, name, args, out)
    asked, rows, rejected = (ids(out / f"{stem}.jsonl") for stem in ("prompts", "rows", "rejected"))
    told = ("cost", "prompt_tokens", "completion_tokens")
    spent = sum((Counter({k: row["usage"].get(k) or 0 for k in told}) for _, row in read(out / "rows.jsonl")), Counter())
    stage.finish(out, len(asked | rejected), len(rows), Counter(row["reason"] for _, row in read(out / "rejected.jsonl")), **spent)


def answer(api, model, args, out):
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
                "model": model, "messages": prompt["messages"], "temperature": temperature,
                "top_p": 1.0, "max_tokens": args.answer_tokens, **extra, **{k: prompt[k] for k in ASKED_WITH if k in prompt}})
            return prompt["id"], answered(prompt, reply, temperature), None
        except Rejected as rejection:
            return prompt["id"], None, str(rejection)

    progress.phase("answering", total, "row", done=total - len(waiting), flight=in_flight())
    tokens = rejected = 0
    in_doubt = []  # refused by HTTP status: is it this request, or are it all?  The next answer tells
    with Appender(out / "rows.jsonl") as rows, Appender(out / "rejected.jsonl") as reject:

        def give_up(cases):
            for case in cases:
                reject.write(case)
            progress.advance(len(cases), rejected=rejected + len(cases))
            return rejected + len(cases)

        for name, row, reason in each(ask, waiting, in_flight()):
            if reason and reason.startswith("http "):
                in_doubt.append({"id": name, "reason": reason})
                if len(in_doubt) == DOUBT:
                    raise Refused(f"{DOUBT} requests in a row were answered {reason}; they are asked again when this is mended")
                continue
            rejected = give_up(in_doubt)
            in_doubt.clear()
            if reason:
                rejected = give_up([{"id": name, "reason": reason}])
            else:
                rows.write(row)
                tokens += row["usage"].get("completion_tokens") or 0
                progress.advance(answer_tokens=tokens)
        if in_doubt and not ids(out / "rows.jsonl"):
            raise Refused(f"every request was answered {in_doubt[0]['reason']}; they are asked again when this is mended")
        give_up(in_doubt)


def answered(prompt, reply, temperature):
    """The row of a reply; Rejected with the reason where it is no answer to train on."""
    if not reply.get("choices"):
        raise Rejected("no choices")
    try:
        choice = reply["choices"][0]
        said, finish, usage = choice["message"], choice.get("finish_reason"), reply.get("usage") or {}
        text, reasoning, calls = said.get("content") or "", said.get("reasoning_content") or said.get("reasoning"), said.get("tool_calls")
        prompt_ids, answer_ids = choice.get("prompt_token_ids"), choice.get("response_token_ids")
    except (LookupError, TypeError, AttributeError):
        raise Rejected("reply without an answer") from None
    if not isinstance(text, str):
        raise Rejected("answer is no text")
    if finish not in ("stop", "length", "tool_calls"):
        raise Rejected(f"finish {finish}")
    if not text.strip() and not calls:  # with a reason: --answer-tokens were used up before the answer began
        raise Rejected("only reasoning" if reasoning else "empty answer")
    if looping(answer_ids or text.split()):
        raise Rejected("answer loops")
    answer = {"role": "assistant", "content": text} | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
    row = {**prompt, "messages": [*prompt["messages"], answer],
           "finish_reason": finish, "usage": usage, "model": reply.get("model"), "temperature": temperature}
    return {**row, "prompt_ids": prompt_ids, "answer_ids": answer_ids} if prompt_ids and answer_ids else row


if __name__ == "__main__":
    stage.run(main)
