"""Measure a served target: passes over the prompts with the draft and without it, in turn, each by a fresh server.

A pass answers all prompts at the most requests in flight, and some of each set at fewer.  pass-ROUND-NAME.json holds
{"levels": {in flight: {"seconds": {set: s}, "rows": [a row a prompt, or null]}}, "differences": [...], "sampled": [...]}, a row
being {"ids", "accepted": [times that 0, 1 .. proposals were accepted], "first", "seconds"} or {"failed": why}.
"""
import json
import random
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
MAIN = "3-1-4"                             # steps, top-k, draft tokens: what acceptance is measured with
NOISE = 0.02, 0.1                          # a gain below is none: by two rounds or more, by one
SAMPLED = 128                              # tokens of an answer at temperature 1, at most
TIE = {"float32": 0.01, "bfloat16": 0.5}   # nats between two tokens that rounding may swap; logits near 30 are 0.125 apart in bfloat16


def sample(prompts, flight, most):
    """{set: [numbers of its prompts]} that are asked with so many in flight: all at `most`, else enough to fill the server."""
    sets = {name: [i for i, p in enumerate(prompts) if p["set"] == name] for name in dict.fromkeys(p["set"] for p in prompts)}
    return sets if flight == most else {name: index[:max(8, 4 * flight)] for name, index in sets.items()}


def one_pass(path, prompts, args, draft, setting, against=None):
    """One pass, kept in `path`; it is timed as a whole, so an interrupted one starts anew.  setting: None for the plain target,
    which weighs where its answers and those of `against`, a pass with the draft, first differ, and how likely it finds both's
    answers at temperature 1."""
    name = f"with the draft {setting}" if setting else "without the draft"
    if path.exists():
        progress.log(f"{path.name} is there: the pass {name} is not repeated")
        return json.loads(path.read_text())
    most, levels, found = max(args.eval_concurrency), {}, {"differences": [], "sampled": []}
    with serve(args.model, stage.part_log(path.parent, "sglang"), args.eval_dtype, draft=setting and draft, setting=setting,
               cache_prefixes=False, max_requests=most, wait_for=f"starting SGLang {name}") as url:
        api = Api(url)
        for _ in each(lambda i: ask(api, prompts[i % len(prompts)]["ids"], 8), range(most), most):
            pass  # warm: kernels, graphs, allocators
        for flight in sorted(args.eval_concurrency, reverse=True):
            chosen, rows, seconds = sample(prompts, flight, most), [None] * len(prompts), {}
            progress.phase(f"answering {name}, {flight} in flight", sum(map(len, chosen.values())), "prompt", flight=flight)
            for subset, index in chosen.items():
                started = time.monotonic()
                for i, rows[i] in each(lambda i: (i, ask(api, prompts[i]["ids"], args.eval_tokens)), index, flight):
                    progress.advance()
                seconds[subset] = time.monotonic() - started
            levels[str(flight)] = {"seconds": seconds, "rows": rows}
            check(rows, args.max_failed, path)
        for i, row in enumerate(against["levels"][str(most)]["rows"] if against else ()):
            plain = levels[str(most)]["rows"][i]
            if "ids" in row and "ids" in plain and row["ids"] != plain["ids"]:
                found["differences"].append({"prompt": i, **difference(api, prompts[i]["ids"], plain["ids"], row["ids"])})
        if args.eval_sampled and setting in (MAIN, None):
            found["sampled"] = sampled(api, prompts, args, most, path)
            for which, answers in {"plain": found["sampled"], "drafted": against["sampled"]}.items() if against else ():
                found[f"nats_{which}"] = [[nats(api, prompts[i]["ids"], ids) for ids in own] for i, own in answers]
    stage.write(path, json.dumps({"levels": levels, **found}))
    return {"levels": levels, **found}


def sampled(api, prompts, args, flight, path):
    """[(number of a prompt, its answers at temperature 1)], --eval-sampled of each, of the 8 first prompts of each set."""
    index = [i for own in sample(prompts, 1, 0).values() for i in own]
    progress.phase("sampling at temperature 1", args.eval_sampled * len(index), "answer", flight=flight)

    def draw(which):  # the seed, another in each pass, is for a server in deterministic mode, which else gives all answers the same
        seed = random.Random(f"{path.stem} {which}").getrandbits(31)
        return which[0], ask(api, prompts[which[0]]["ids"], SAMPLED, {"temperature": 1.0, "sampling_seed": seed})

    answers, rows = {i: [] for i in index}, []
    for i, row in each(draw, [(i, k) for k in range(args.eval_sampled) for i in index], flight):
        answers[i].append(row.get("ids"))
        rows.append(row)
        progress.advance()
    check(rows, args.max_failed, path)
    return [(i, list(filter(None, own))) for i, own in answers.items()]


def nats(api, prompt, ids):
    """The mean log-probability of an answer's tokens by the server's own count; None if it fills the window and can't be asked."""
    try:
        about = api.post("/generate", {"input_ids": prompt + ids, "return_logprob": True, "logprob_start_len": len(prompt) - 1,
                                       "sampling_params": {**SAMPLING, "max_new_tokens": 1}})["meta_info"]
    except Rejected:
        return None
    return sum(entry[0] for entry in about["input_token_logprobs"][-len(ids):]) / len(ids)


def same_distribution(plain, draws=10_000):
    """Whether answers at temperature 1 with the draft are what the plain target draws, by the plain pass's "nats_*": the mean over
    the prompts with and without it, and p, the share of permutations of each prompt's answers between the two that differ as
    much.  A server that verifies greedily, say, gives likelier answers than the target would.  Or why that is not known."""
    import numpy

    told = ([[n for n in own if n is not None] for own in plain[f"nats_{which}"]] for which in ("drafted", "plain"))
    pairs, chance = [(a, b) for a, b in zip(*told) if a and b], numpy.random.default_rng(0)
    if not pairs:
        return "no prompt has any both with the draft and without"
    drafted, own = (numpy.mean([numpy.mean(pair[k]) for pair in pairs]) for k in (0, 1))
    permuted = [chance.permuted(numpy.tile(a + b, (draws, 1)), axis=1) for a, b in pairs]
    gaps = numpy.mean([p[:, :len(a)].mean(1) - p[:, len(a):].mean(1) for p, (a, _) in zip(permuted, pairs)], axis=0)
    p = float((abs(gaps) >= abs(drafted - own) - 1e-9).mean())
    return {"prompts": len(pairs), "answers": sum(len(a) for a, _ in pairs), "nats_with_draft": round(float(drafted), 4),
            "nats_plain": round(float(own), 4), "difference": round(float(drafted - own), 4), "p": p, "same": p > 0.001}


def ask(api, ids, tokens, sampling={}, **more):
    """One answer, streamed as two events, so that the client's own work does not slow the server down; or why there is none."""
    try:
        first, seconds, reply = api.stream("/generate", {"input_ids": ids, "stream": True, **more, "sampling_params": {
            **SAMPLING, **sampling, "max_new_tokens": tokens, "stream_interval": 1 << 20}})
    except Rejected as reason:
        return {"failed": str(reason)}
    about = reply["meta_info"]
    if about["finish_reason"]["type"] == "abort" or len(reply["output_ids"]) != about["completion_tokens"]:
        return {"failed": f"{len(reply['output_ids'])} of {about['completion_tokens']} tokens, {about['finish_reason']}"}
    return {"ids": reply["output_ids"], "accepted": about.get("spec_correct_drafts_histogram") or [], "first": round(first, 4),
            "seconds": round(seconds, 4), **({"about": about} if more else {})}


def check(rows, most, path):
    """Refuse a pass of which more than the share `most` has failed: what is left would be another set of prompts."""
    failed, asked = [row["failed"] for row in rows if row and "failed" in row], sum(map(bool, rows))
    if len(failed) > most * asked:
        raise Refused(f"{path.stem}: {len(failed)} of {asked} requests failed, more than --max-failed {most:g}; e.g. {failed[0]}")


def difference(api, prompt, plain, drafted):
    """Where two answers first differ, and by how many nats the plain server prefers its own token there (None: it can't say)."""
    at = next((k for k, (a, b) in enumerate(zip(plain, drafted)) if a != b), None)
    if at is None:  # one ended, the other went on
        return {"position": min(len(plain), len(drafted)), "gap": None}
    about = ask(api, prompt + plain[:at], 1, return_logprob=True, token_ids_logprob=[plain[at], drafted[at]]).get("about")
    gap = about and about["output_token_ids_logprobs"][0][0][0] - about["output_token_ids_logprobs"][0][1][0]
    return {"position": at, "gap": gap}


def acceptance(prompts, rows, index, steps=3):
    """What the draft's proposals on these prompts were worth, up to `steps` of them at a time."""
    counts = [rows[i]["accepted"] for i in index]
    total = [sum(c[k] for c in counts if k < len(c)) for k in range(steps + 1)]
    pairs, length = [(sum(c), sum(k * n for k, n in enumerate(c))) for c in counts], walk.acceptance_length(total)
    means = [1 + a / v for v, a in pairs if v]
    beyond = sum(max(0, v + a - len(rows[i]["ids"])) for i, (v, a) in zip(index, pairs))  # accepted past the end of an answer
    return {"acceptance_length": round(length, 3), "interval": walk.interval(pairs, [prompts[i]["set"] for i in index]),
            "within_answers": round(length - beyond / max(1, sum(total)), 3), "accepted_per_verification": round(length - 1, 3),
            "mean_of_means": round(sum(means) / max(1, len(means)), 3),
            "acceptance_by_position": walk.by_position(total, steps), "conditional_acceptance": walk.conditional(total, steps),
            "accepted": total, "prompts": len(index)}


def lossless(drafted, plain, most, dtype):
    """How many greedy answers of a pass with the draft are those of the plain one, and why the others are not."""
    both = sum("ids" in a and "ids" in b for a, b in zip(drafted["levels"][most]["rows"], plain["levels"][most]["rows"]))
    found, tie = plain["differences"], TIE.get(dtype, TIE["bfloat16"])
    ties = sum(d["gap"] is not None and abs(d["gap"]) <= tie for d in found)
    return {"dtype": dtype, "same": both - len(found), "near_ties": ties, "different": len(found) - ties, "tie": tie, "first_differences": found}


def speed(prompts, levels, subset=None):
    """Of one level, by several rounds: tokens a second over all, their spread between rounds, and medians of the requests."""
    from statistics import median

    rates, answers = [], []
    for level in levels:
        own = [row for row, p in zip(level["rows"], prompts) if row and "ids" in row and subset in (None, p["set"])]
        rates.append((sum(len(row["ids"]) for row in own), sum(s for name, s in level["seconds"].items() if subset in (None, name))))
        answers += own
    each_ = [tokens / s for tokens, s in rates]
    later = [(row["seconds"] - row["first"]) / (len(row["ids"]) - 1) for row in answers if len(row["ids"]) > 1]
    return {"tokens_per_s": round(sum(t for t, _ in rates) / sum(s for _, s in rates), 1),
            "spread": round((max(each_) - min(each_)) / (max(each_) or 1), 3) if len(each_) > 1 else None,
            "ms_per_token": round(1000 * median(later), 2) if later else None,
            "ms_to_first_token": round(1000 * median(row["first"] for row in answers), 1) if answers else None,
            "requests": sum(map(bool, (row for level in levels for row in level["rows"]))), "answered": len(answers)}


def advice(speeds):
    """{in flight: {setting or None, best, speedup, noise}}: the fastest setting where it gains more than noise, else no draft.

    speeds: {setting or "plain": {in flight: speed()}}."""
    found = {}
    for flight, plain in speeds["plain"].items():
        best = max(speeds.keys() - {"plain"}, key=lambda name: speeds[name][flight]["tokens_per_s"])
        gain, spreads = speeds[best][flight]["tokens_per_s"] / plain["tokens_per_s"], (plain["spread"], speeds[best][flight]["spread"])
        noise = NOISE[1] if None in spreads else max(NOISE[0], *spreads)
        found[flight] = {"setting": best if gain > 1 + noise else None, "best": best, "speedup": round(gain, 3), "noise": noise}
    return found


def summarize(prompts, passes, args):
    """Figures of all prompts, and of each set under "sets"; acceptance and sameness by the last round, speed by all of them."""
    most = str(max(args.eval_concurrency))
    rows = {name: found[-1]["levels"][most]["rows"] for name, found in passes.items()}
    drafted, plain = rows[MAIN], rows["plain"]
    index = [i for i in range(len(prompts)) if "ids" in drafted[i] and "ids" in plain[i]]
    if not any(drafted[i]["accepted"] for i in index):
        raise Refused(f"{stage.part_log(args.out, 'sglang')}: the server reports no verification; it did not use the draft")
    speeds = {name: {flight: speed(prompts, [p["levels"][flight] for p in found]) for flight in sorted(found[0]["levels"], key=int)}
              for name, found in passes.items()}

    def figures(subset=None):
        own = [i for i in index if subset in (None, prompts[i]["set"])]
        rate, base = (speed(prompts, [p["levels"][most] for p in passes[name]], subset)["tokens_per_s"] for name in (MAIN, "plain"))
        return {**acceptance(prompts, drafted, own), "tokens_per_s": rate, "tokens_per_s_baseline": base,
                "speedup": round(rate / base, 3) if base else None, "asked": sum(subset in (None, p["set"]) for p in prompts),
                "identical_outputs": round(sum(plain[i]["ids"] == drafted[i]["ids"] for i in own) / max(1, len(own)), 4)}

    return {**figures(), "sets": {name: figures(name) for name in dict.fromkeys(p["set"] for p in prompts)}, "speeds": speeds,
            "advice": advice(speeds), "by_setting": {name: acceptance(prompts, r, [i for i in index if "ids" in r[i]], int(name.split("-")[0]))
                                                     for name, r in rows.items() if name != "plain"},
            "lossless": lossless(passes[MAIN][-1], passes["plain"][-1], most, args.eval_dtype),
            "temperature_1": same_distribution(passes["plain"][-1]) if args.eval_sampled else "none were asked for",
            "rows": [{"set": p["set"], "id": p["id"], **({"tokens": len(d["ids"]), "identical": d["ids"] == a["ids"], "acceptance_length":
                      round(walk.acceptance_length(d["accepted"]), 3)} if i in index else {"failed": d.get("failed") or a.get("failed")})}
                     for i, (p, d, a) in enumerate(zip(prompts, drafted, plain))]}
