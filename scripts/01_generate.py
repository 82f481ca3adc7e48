"""Answer prompts with the target model, through any OpenAI-compatible API.

Example
    python scripts/01_generate.py --prompts self:200 --model models/smollm2-135m --out runs/try/01_generate
    API_KEY=... python scripts/01_generate.py --prompts prompts.jsonl --model models/qwen3-8b --out runs/q/01_generate \\
        --api https://openrouter.ai/api/v1 --api-model qwen/qwen3-8b --max-cost 20

Reads   --prompts FILE   JSON Lines or parquet: {"messages"}, ShareGPT's {"conversations"} or {"prompt"}; also id, system,
                         tools, chat_template_kwargs, source.  Every answer in it is made anew, on the new ones before it
                 hf:NAME[:CONFIG][:SPLIT]   the same from a Hugging Face data set (HF_HUB_OFFLINE=0 fetches it)
                 self:N  the target invents N user questions first (Magpie, arXiv 2406.08464)
        --model          the target: served by a SGLang of our own, unless --api names servers of it
Writes  prompts.jsonl    id, messages                                          what is to be answered
        rows.jsonl       id, messages (answers included: content, reasoning_content, tool_calls), finish_reason, usage, cost,
                         model, provider, temperature, top_p, max_tokens, and from SGLang or vLLM prompt_ids, answer_ids:
                         what the server saw and produced (of an earlier answer in its message)
        rejected.jsonl   id, reason, detail
        ledger.jsonl     what was asked and what it cost (ledger.py)
        done.json

Resumes by id: what is in rows.jsonl or rejected.jsonl is not asked again.  The key comes from API_KEY; CONCURRENCY (default:
64 here, found for an API), RPM, TPM and DEADLINE are limits of the environment (api.py).  --max-cost and the prices may change
between runs.
"""
import argparse
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import progress
import prompts
import settings
import stage
from api import Api, Pace, Rejected, each, in_flight
from chat import load_tokenizer, user_turn
from jsonl import Appender, Known, read
from ledger import Ledger
from sglang_server import serve
from stage import Refused
from talks import Asker, fields


DOUBT = 16  # requests refused in a row that mean a wrong setting rather than wrong prompts


def prompts_source(text):
    if not text.startswith("self:"):
        return text if text.startswith("hf:") else Path(text)
    if not text[5:].isdigit() or int(text[5:]) == 0:
        raise argparse.ArgumentTypeError(f"{text}: wanted self:N with N > 0")
    return text


def floats(text):
    return [float(number) for number in text.split(",")]


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--prompts", type=prompts_source, required=True, help="FILE, hf:NAME, or self:N for N invented questions")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--api", default="", help="base URL of an OpenAI-compatible server, or several (default: serve here)")
    p.add_argument("--api-model", default="", help="the target's name at --api")
    p.add_argument("--answered-by", default="", help="the model that replies name, where it is not --api-model")
    p.add_argument("--temperature", type=floats, default=[0.7],
                   help="of the answers; of a list one each, by the id's hash (default 0.7)")
    p.add_argument("--answer-tokens", type=stage.count, default=2048, help="most tokens of an answer (default 2048)")
    p.add_argument("--question-tokens", type=stage.count, default=64, help="most tokens of an invented question (default 64)")
    p.add_argument("--reasoning", default="", help="an effort (none, low, high) or fields as OpenRouter takes them")
    p.add_argument("--pin-provider", default="", help="of a router: only this provider, or these with commas")
    p.add_argument("--extra-body", type=fields, default={}, help="more fields of a request: top_k=20,a.b=1")
    p.add_argument("--prices", type=floats, help="dollars a million tokens of prompts and of answers (default: as replies say)")
    p.add_argument("--max-cost", type=float, help="dollars; stops before they are passed (default: no limit)")
    p.add_argument("--generate-dtype", default="bfloat16", help="of the server that we start (default bfloat16)")
    args = p.parse_args()
    if bool(args.api) != bool(args.api_model):
        p.error("--api and --api-model go together")
    if "@" in args.api or "?" in args.api:
        p.error("--api holds more than an address: keys and passwords belong into API_KEY, which is stored nowhere")
    if args.prices and len(args.prices) != 2:
        p.error("--prices are two: of prompts and of answers")
    return args


def main():
    args = arguments()
    money = [vars(args).pop(name) for name in ("prices", "max_cost")]  # change no row, so they pin no run
    out = stage.begin(args)
    name, opening = args.api_model or args.model.name, None
    if isinstance(args.prompts, str) and args.prompts.startswith("self:"):
        opening, wanted = user_turn(load_tokenizer(args.model)), int(args.prompts[5:])
    else:  # bad input is found before a server is started
        progress.phase("reading prompts")
        prompts.copy(args.prompts, out)
        wanted = lines(out / "prompts.jsonl")
    progress.plan("starting SGLang", ("inventing", wanted), ("answering", wanted), "stopping SGLang", rows=wanted)
    server = nullcontext() if args.api else serve(
        args.model, stage.part_log(out, "sglang"), args.generate_dtype, max_requests=in_flight())
    with server as url:
        if args.api:
            limits = (settings.number(name, "inf", 0.01) for name in ("RPM", "TPM"))
            api = Api(args.api, os.environ.get("API_KEY"), pace=Pace(in_flight(0), args.answer_tokens, *limits))
        else:
            api = Api(url + "/v1", pace=Pace(in_flight()))
        if opening:
            prompts.invent(api, name, opening, wanted, args.question_tokens, out)
        counts = answer(api, name, args, out, money)
    stage.finish(out, **counts)


def lines(path):
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def request(model, args):
    """The fields of every request, but for messages and temperature."""
    body = {"model": model, "top_p": 1.0, "max_tokens": args.answer_tokens}
    if args.pin_provider:
        body["provider"] = {"only": args.pin_provider.split(","), "allow_fallbacks": False}
    if args.reasoning:
        body["reasoning"] = fields(args.reasoning) if "=" in args.reasoning else {"effort": args.reasoning}
    return body | args.extra_body


def answer(api, model, args, out, money):
    """Answer every prompt that is neither in rows.jsonl nor in rejected.jsonl yet; returns what done.json says."""
    finished, counts, dropped, lengths = Known(), Counter(rows=0, cut=0, shortened=0), Counter(), Counter()

    def count(row):
        if "reason" in row:
            dropped[row["reason"]] += 1
            return
        tokens = row["usage"].get("completion_tokens") or 0
        lengths[tokens] += 1
        counts.update(rows=1, cut=row["finish_reason"] == "length", shortened="ended" in row)
        if 20 <= lengths[tokens] > counts["rows"] / 10 and 32 <= tokens != args.answer_tokens and not counts["same_length"]:
            counts["same_length"] = tokens
            progress.log(f"warning: {lengths[tokens]} of {counts['rows']} answers have exactly {tokens} tokens, though "
                         f"{args.answer_tokens} were allowed: does the provider cap them?")

    def waiting():
        for _, prompt in read(out / "prompts.jsonl"):
            if not finished.get(prompt["id"]):
                kwargs = args.extra_body.get("chat_template_kwargs", {}) | prompt.get("chat_template_kwargs", {})
                yield prompt | ({"chat_template_kwargs": kwargs} if kwargs else {})  # 02 renders with them

    def store(found):
        for row in found:
            (rejected if "reason" in row else rows).write(row)
            ledger.turns.pop(row["id"], None)
            count(row)
        cost = {"cost": f"${ledger.spent['cost']:.4f}"} if ledger.spent["cost"] else {}
        progress.advance(len(found), answer_tokens=ledger.spent["completion_tokens"], rejected=dropped.total() - unasked, **cost)

    with Appender(out / "rows.jsonl") as rows, Appender(out / "rejected.jsonl") as rejected:
        for path in (out / "rows.jsonl", out / "rejected.jsonl"):
            for _, row in read(path):
                if finished.add(row["id"]):
                    raise Refused(f"{path} holds {row['id']} twice")
                count(row)
        unasked = sum(n for reason, n in dropped.items() if reason.startswith(("duplicate", "question")))
        total = lines(out / "prompts.jsonl")
        ledger = Ledger(out, finished, *money)
        asker = Asker(api, ledger, request(model, args), args.temperature, args.answered_by or model)
        progress.phase("answering", total, "row", done=counts["rows"] + dropped.total() - unasked, flight=in_flight())
        in_doubt, problem = [], ""  # is it this request, or are it all?  The next answer tells
        for row in each(asker, waiting(), api.pace, lambda prompt, again: asker.row(prompt, Rejected(again.reason))):
            in_doubt.append(row)
            if row.get("reason", "").startswith(("http", "timed out", "another model")):
                problem = f"{row['reason']} {row.get('detail', '')}"
                if len(in_doubt) == DOUBT:
                    raise Refused(f"{DOUBT} requests in a row ended with {problem}; they are asked again when this is mended")
            else:
                store(in_doubt)
                in_doubt = []
        if in_doubt and not counts["rows"]:
            raise Refused(f"every request ended with {problem}; they are asked again when this is mended")
        store(in_doubt)
    if counts["cut"] or dropped["only reasoning"]:
        progress.log(f"{counts['cut']} of {counts['rows']} answers were cut (kept as cut), {dropped['only reasoning']} were all "
                     f"reasoning: --answer-tokens {args.answer_tokens}")
    if ledger.open:
        progress.log(f"unaccounted: {ledger.open} requests, whose answers never came; at most ${ledger.at_most:.4f}")
    return {"rows_in": total + unasked, "rows_out": counts.pop("rows"), "dropped": dropped, **counts, **ledger.spent,
            "unaccounted": ledger.open, "unaccounted_cost": round(ledger.at_most, 6), "retried": api.pace.retried}


if __name__ == "__main__":
    stage.run(main)
