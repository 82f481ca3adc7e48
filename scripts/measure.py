"""Measure a served target: passes over the prompts with the draft and without it, in turn, each by a fresh server.

A pass answers all prompts at the most requests in flight, and some of each set at fewer.  Kept in pass-ROUND-NAME.json:
{"levels": {in flight: {"seconds": {set: s}, "rows": [a row a prompt, or null]}}, "differences": [...]}, a row being
{"ids", "accepted": [times that 0, 1 .. proposals were accepted], "first", "seconds"} or {"failed": why}.
"""
import json
import time

import progress
import stage
import walk
from api import Api, Rejected, each
from sglang_server import serve
from stage import Refused

# Explicit, all of it: a server's own defaults, or a model's, would be other questions.
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "repetition_penalty": 1.0, "ignore_eos": False}
SAME = 0.02                                # a gain below it is none
TIE = {"float32": 0.01, "bfloat16": 0.5}   # nats between two tokens that rounding may swap; logits near 30 are 0.125 apart in bfloat16


def sample(prompts, flight, most):
    """{set: [numbers of its prompts]} that are asked with so many in flight: all at `most`, else enough to fill the server."""
    sets = {name: [i for i, p in enumerate(prompts) if p["set"] == name] for name in dict.fromkeys(p["set"] for p in prompts)}
    return sets if flight == most else {name: index[:max(8, 4 * flight)] for name, index in sets.items()}


def one_pass(path, prompts, args, draft=None, setting=None, against=None):
    """One pass, kept in `path`; it is timed as a whole, so an interrupted one starts anew.  against: the rows of a pass with the
    draft, whose answers' first differences are weighed by this server's own probabilities."""
    name = f"with the draft {setting}" if setting else "without the draft"
    if path.exists():
        progress.log(f"{path.name} is there: the pass {name} is not repeated")
        return json.loads(path.read_text())
    most, found = max(args.eval_concurrency), {"levels": {}}
    with serve(args.model, stage.part_log(path.parent, "sglang"), args.eval_dtype, draft=setting and draft, setting=setting,
               cache_prefixes=False, max_requests=most, wait_for=f"starting SGLang {name}") as url:
        api = Api(url)
        for _ in each(lambda i: ask(api, prompts[i % len(prompts)]["ids"], 8), range(most), most):
            pass  # warm: kernels, graphs, allocators
        for flight in sorted(args.eval_concurrency, reverse=True):
            found["levels"][str(flight)] = level(api, prompts, flight, most, args.eval_tokens, name)
        if against:
            found["differences"] = differences(api, prompts, found["levels"][str(most)]["rows"], against)
    check(found, args.max_failed, path)
    stage.write(path, json.dumps(found))
    return found


def ask(api, ids, tokens, **more):
    """One answer, streamed as two events, so that the client's own work does not slow the server down; or why there is none."""
    try:
        first, seconds, reply = api.stream("/generate", {"input_ids": ids, "stream": True, **more, "sampling_params": {
            **SAMPLING, "max_new_tokens": tokens, "stream_interval": 1 << 20}})
    except Rejected as reason:
        return {"failed": str(reason)}
    about = reply["meta_info"]
    if about["finish_reason"]["type"] == "abort" or len(reply["output_ids"]) != about["completion_tokens"]:
        return {"failed": f"{len(reply['output_ids'])} of {about['completion_tokens']} tokens, {about['finish_reason']}"}
    return {"ids": reply["output_ids"], "accepted": about.get("spec_correct_drafts_histogram") or [], "first": round(first, 4),
            "seconds": round(seconds, 4), **({"about": about} if more else {})}


def level(api, prompts, flight, most, tokens, name):
    chosen, rows, seconds = sample(prompts, flight, most), [None] * len(prompts), {}
    progress.phase(f"answering {name}, {flight} in flight", sum(map(len, chosen.values())), "prompt", flight=flight)
    for subset, index in chosen.items():
        started = time.monotonic()
        for i, row in each(lambda i: (i, ask(api, prompts[i]["ids"], tokens)), index, flight):
            rows[i] = row
            progress.advance()
        seconds[subset] = time.monotonic() - started
    return {"seconds": seconds, "rows": rows}


def check(found, most, path):
    """Refuse a pass of which more than the share `most` has failed: what is left would be another set of prompts."""
    asked = [row for level in found["levels"].values() for row in level["rows"] if row]
    failed = [row["failed"] for row in asked if "failed" in row]
    if len(failed) > most * len(asked):
        raise Refused(f"{path.name}: {len(failed)} of {len(asked)} requests failed, more than --max-failed {most:g}; e.g. {failed[0]}")


def differences(api, prompts, plain, drafted):
    """Where answers with and without the draft first differ: [{prompt, position, gap}]; gap: how much less likely, in nats, the
    plain server finds the draft's token than its own."""
    found = []
    for i, (a, b) in enumerate(zip(plain, drafted)):
        if "ids" not in a or "ids" not in b or a["ids"] == b["ids"]:
            continue
        at = next((k for k, (s, t) in enumerate(zip(a["ids"], b["ids"])) if s != t), min(len(a["ids"]), len(b["ids"])))
        gap = None  # one answer ended, the other went on
        if at < min(len(a["ids"]), len(b["ids"])):
            reply = ask(api, prompts[i]["ids"] + a["ids"][:at], 1, return_logprob=True, token_ids_logprob=[a["ids"][at], b["ids"][at]])
            if "about" in reply:
                own, other = (entry[0] for entry in reply["about"]["output_token_ids_logprobs"][0])
                gap = round(own - other, 4)
        found.append({"prompt": i, "position": at, "gap": gap})
    return found


def answered(*passes):
    """Numbers of the prompts that all of these rows have an answer of."""
    return [i for i, rows in enumerate(zip(*passes)) if all(row and "ids" in row for row in rows)]


def acceptance(prompts, rows, index):
    """What the draft's proposals on these prompts were worth."""
    counts = [rows[i]["accepted"] for i in index]
    steps = max([len(c) for c in counts] + [2]) - 1
    total = [sum(c[k] for c in counts if k < len(c)) for k in range(steps + 1)]
    pairs = [(sum(c), sum(k * n for k, n in enumerate(c))) for c in counts]
    each_ = [1 + a / v for v, a in pairs if v]
    return {"acceptance_length": round(walk.acceptance_length(total), 3), "interval": walk.interval(pairs, [prompts[i]["set"] for i in index]),
            "accepted_per_verification": round(walk.acceptance_length(total) - 1, 3), "accepted": total,
            "acceptance_by_position": walk.by_position(total, steps), "conditional_acceptance": walk.conditional(total, steps),
            "mean_of_means": round(sum(each_) / max(1, len(each_)), 3), "prompts": len(index)}


def speed(prompts, levels, subset=None):
    """Of the same level of several rounds: tokens a second over all, its spread between rounds, and medians of the requests."""
    import numpy

    names = [subset] if subset else list(levels[0]["seconds"])
    rates, rows = [], []
    for level in levels:
        own = [row for row, p in zip(level["rows"], prompts) if row and "ids" in row and p["set"] in names]
        rates.append((sum(len(row["ids"]) for row in own), sum(level["seconds"][n] for n in names)))
        rows += own
    each_ = [tokens / s for tokens, s in rates]
    later = [(row["seconds"] - row["first"]) / (len(row["ids"]) - 1) for row in rows if len(row["ids"]) > 1]
    return {"tokens_per_s": round(sum(t for t, _ in rates) / sum(s for _, s in rates), 1),
            "spread": round((max(each_) - min(each_)) / max(each_), 3),
            "ms_per_token": round(1000 * float(numpy.median(later)), 2) if later else None,
            "ms_to_first_token": round(1000 * float(numpy.median([row["first"] for row in rows])), 1),
            "requests": len(rows), "failed": sum("failed" in row for level in levels for row in level["rows"] if row)}


def advice(speeds):
    """{in flight: {setting or None, speedup, noise}}: the fastest setting where it gains more than noise, else no draft.

    speeds: {setting or "plain": {in flight: speed()}}."""
    found = {}
    for flight, plain in speeds["plain"].items():
        best = max((name for name in speeds if name != "plain"), key=lambda name: speeds[name][flight]["tokens_per_s"])
        gain = speeds[best][flight]["tokens_per_s"] / plain["tokens_per_s"]
        noise = max(SAME, plain["spread"], speeds[best][flight]["spread"])
        found[flight] = {"setting": best if gain > 1 + noise else None, "best": best, "speedup": round(gain, 3), "noise": noise}
    return found


def lossless(prompts, found, compared, dtype):
    """Prompts by how the two answers compare: the same; apart at a near tie, which rounding decides; apart for no such reason."""
    ties = [d for d in found if d["gap"] is not None and abs(d["gap"]) <= TIE.get(dtype, TIE["bfloat16"])]
    return {"same": compared - len(found), "near_ties": len(ties), "different": len(found) - len(ties), "tie": TIE.get(dtype, TIE["bfloat16"]),
            "first_differences": [{**d, "prompt": prompts[d["prompt"]]["id"], "set": prompts[d["prompt"]]["set"]} for d in found]}


def device_name():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def summarize(prompts, passes, main, args):
    """Figures of all prompts, and of each set under "sets"; acceptance and lossless of the last round, speed of all."""
    most = str(max(args.eval_concurrency))
    drafted, plain = (passes[name][-1]["levels"][most]["rows"] for name in (main, "plain"))
    index = answered(drafted, plain)
    if not any(drafted[i]["accepted"] for i in index):
        raise Refused(f"{stage.part_log(args.out, 'sglang')}: the server reports no verification; it did not use the draft")
    speeds = {name: {str(n): speed(prompts, [p["levels"][str(n)] for p in found]) for n in args.eval_concurrency}
              for name, found in passes.items()}

    def figures(subset, index):
        rate, base = (speed(prompts, [p["levels"][most] for p in passes[name]], subset)["tokens_per_s"] for name in (main, "plain"))
        return {**acceptance(prompts, drafted, index), "tokens_per_s": rate, "tokens_per_s_baseline": base,
                "speedup": round(rate / base, 3), "asked": len([p for p in prompts if subset in (None, p["set"])]),
                "identical_outputs": round(sum(plain[i]["ids"] == drafted[i]["ids"] for i in index) / max(1, len(index)), 4)}

    sets = {name: figures(name, [i for i in index if prompts[i]["set"] == name]) for name in dict.fromkeys(p["set"] for p in prompts)}
    rows = [{"failed": True} if i not in index else {
        "tokens": len(drafted[i]["ids"]), "identical": drafted[i]["ids"] == plain[i]["ids"],
        "acceptance_length": round(walk.acceptance_length(drafted[i]["accepted"]), 3)} for i in range(len(prompts))]
    settings = {name: acceptance(prompts, found[-1]["levels"][most]["rows"], index) for name, found in passes.items() if name != "plain"}
    return {**figures(None, index), "sets": sets, "speeds": speeds, "advice": advice(speeds), "by_setting": settings, "rows": rows,
            "lossless": lossless(prompts, passes["plain"][-1]["differences"], len(index), args.eval_dtype)}
