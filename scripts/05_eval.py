"""Serve the target with and without the draft on the same prompts: acceptance length, speed, same output, what to serve with.

Example
    python scripts/05_eval.py --draft runs/try/base/04_train --model models/smollm2-135m --tokens runs/try/02_prepare \\
        --eval-prompts runs/try/02_prepare/heldout.jsonl models/humaneval.jsonl --out runs/try/base/05_eval

Reads   --draft          04_train: sglang/, draft/, contract.json; or any draft's own directory, safetensors only, in
                         speculators' layout or that of SGLang, SpecForge and EAGLE
        --model          the target
        --tokens         02_prepare: the training rows, which no prompt may come from
        --eval-prompts   files of {"id", "messages"} or {"prompt"} lines, each a set of its own
Writes  sglang/          a draft of others as it is served here, its layers named
        pass-*.json      answers, timing, the server's counts of accepted proposals; one file a server
        rows.jsonl       one row a prompt: set, id, tokens, acceptance length, identical
        results.json     acceptance_length with its interval, by position and set; tokens_per_s, tokens_per_s_baseline, speedup
                         (at the most requests in flight), speeds of all settings, advice, lossless, walked, settings
        report.md, report.html, *.png      the same to be read; make report writes them anew
        card.md          the draft's model card with these figures
        done.json

Acceptance length: 1 + accepted proposals per verification, pooled over all verifications of all prompts, from the server's
own counts; the 95 % interval draws prompts anew.  Temperature 0.  Every setting and the plain target get a fresh server,
--eval-rounds times in turn.  Whether the draft changes the output is asked in float32, of 8 prompts of each set if --eval-dtype
is another and the target fits in memory so, and of answers at temperature 1.  Where the target fits in memory, the greedy
answers are also walked with the trainer's model: it must agree with the server (walk.py).
"""
import argparse
import json
import re
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import chat
import contract
import loadable
import measure
import progress
import questions
import report
import stage
import states
import walk
from measure import MAIN
from sglang_server import device
from stage import Refused


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--draft", type=Path, required=True, help="04_train's directory, or a draft's own")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--tokens", type=Path, help="02_prepare's directory (default: the training rows are unknown)")
    p.add_argument("--eval-prompts", type=Path, nargs="+", required=True, help="one file a set of prompts")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--eval-rows", type=stage.count, default=80, help="prompts of each set, from its start (default 80)")
    p.add_argument("--eval-tokens", type=stage.count, default=512, help="most tokens of an answer (default 512)")
    p.add_argument("--eval-concurrency", type=lambda text: [stage.count(n) for n in text.split(",")], default=[1, 8, 32],
                   help="requests in flight; the most get all prompts, the others 8 of each set or four times as many as fly (default 1,8,32)")
    p.add_argument("--eval-rounds", type=stage.count, default=2, help="servers of each setting, in turn; from two on the noise is known (default 2)")
    p.add_argument("--eval-dtype", default="bfloat16", help="float32, on a CPU: outputs should be identical (default bfloat16)")
    p.add_argument("--sweep", type=lambda text: re.fullmatch(r"\d+-\d+-\d+(,\d+-\d+-\d+)*", text)[0].split(","), default=[],
                   help="other settings to try, as steps-topk-tokens: 1-1-2,2-1-3,5-1-6,5-4-16; each costs --eval-rounds servers (default none)")
    p.add_argument("--eval-sampled", type=int, default=8 if device() == "cuda" else 0, help="answers at temperature 1 to each of 8 prompts "
                   "of each set, with the draft and without: are they equally likely? (default 8 with a GPU; a CPU's SGLang verifies greedily)")
    p.add_argument("--max-failed", type=float, default=0.02, help="share of requests that may fail (default 0.02)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "comparing the prompts", "loading the draft", *["starting SGLang", "answering", "stopping SGLang"] * 2,
                  "loading the target", "walking")
    progress.phase("loading libraries")
    import export

    made = {}
    if (args.draft / "contract.json").exists():
        made = contract.check(args.draft, target=stage.model_identity(args.model), tokenizer=contract.tokenizer_hash(args.model))
    tokenizer = chat.load_tokenizer(args.model)
    mode = made.get("chat_template_kwargs") or {}
    prompts = [prompt for path in args.eval_prompts for prompt in questions.load(path, tokenizer, args.eval_rows, mode)]
    asked, (same, near) = len(prompts), questions.seen(prompts, args.tokens) if args.tokens else ((), ())
    overlap = {"checked": bool(args.tokens), "same": [prompts[i]["id"] for i in same], "near": [prompts[i]["id"] for i in near]}
    prompts = [p for i, p in enumerate(prompts) if i not in set(same)]
    if not prompts:
        raise Refused(f"all {asked} prompts are in the training rows of {args.tokens}")
    progress.phase("loading the draft as the engine does")
    served = export.adopt(args.draft, out / "sglang", args.model, made.get("layer_ids"))
    wrong = loadable.wrong_in(served)
    if isinstance(wrong, list) and wrong:
        raise Refused(f"SGLang would not load {served} as it is: {'; '.join(wrong[:6])}")
    loaded = wrong or "every weight has its place"
    progress.log(f"the engine's own loader on {served}: {loaded}")

    names = [*dict.fromkeys([MAIN, *args.sweep]), "plain"]
    paths = [(name, out / f"pass-{k}-{name}.json") for k in range(1, args.eval_rounds + 1) for name in names]
    most = max(args.eval_concurrency)
    asking = [("answering", sum(map(len, measure.sample(prompts, n, most).values()))) for n in sorted(args.eval_concurrency, reverse=True)]
    exact = args.eval_dtype != "float32" and states.reference_device(args.model) == device()
    index = [i for own in measure.sample(prompts, 1, 0).values() for i in own]
    progress.plan(*chain.from_iterable(["starting SGLang", *asking, *[("sampling", args.eval_sampled * len(index))] * (
                  args.eval_sampled > 0 and name in (MAIN, "plain")), "stopping SGLang"] for name, path in paths if not path.exists()),
                  *["starting SGLang", ("answering", len(index)), "stopping SGLang"] * (2 if exact else 0),
                  "loading the target", ("walking", len(prompts)))
    passes = {name: [] for name in names}
    for name, path in paths:
        plain = name == "plain"
        passes[name].append(measure.one_pass(path, prompts, args, served, None if plain else name, passes[MAIN][-1] if plain else None))
    results = measure.summarize(prompts, passes, args)
    if exact:
        results["lossless"] = in_float32(prompts, index, args, served) or results["lossless"]
    results["walked"] = walk.drafts(args, made, prompts, passes["plain"][-1]["levels"][str(most)]["rows"])
    stage.write(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in results.pop("rows")))
    steps, top_k, tokens = map(int, MAIN.split("-"))
    results |= {"overlap": overlap, "run": report.gather(args), "settings": {
        "steps": steps, "top_k": top_k, "draft_tokens": tokens, "sampling": {**measure.SAMPLING, "max_new_tokens": args.eval_tokens},
        "dtype": args.eval_dtype, "engine": f"sglang {version('sglang')}", "device": device(), "target": stage.model_identity(args.model),
        "chat_template_kwargs": mode, "rows": args.eval_rows, "sets": {path.stem: stage.identity(path) for path in args.eval_prompts},
        "concurrency": args.eval_concurrency, "rounds": args.eval_rounds, "draft_identity": stage.identity(args.draft), "loader": loaded,
        **{name: str(Path(*path.parts[-2:]) if path.is_absolute() else path) for name, path in (("model", args.model), ("draft", served))}}}
    stage.write(out / "results.json", json.dumps(results, indent=1) + "\n")
    report.write(out)
    for name, r in {"all": results, **results["sets"]}.items():
        progress.log(f"{name}: acceptance length {r['acceptance_length']} ({r['interval'][0]} to {r['interval'][1]})  speed-up "
                     f"{r['speedup']}  identical {r['identical_outputs']:.0%} of {r['prompts']}")
    agree(results)
    stage.finish(out, asked, results["prompts"], {"in the training rows": len(same), "failed": len(prompts) - results["prompts"]},
                 acceptance_length=results["acceptance_length"], speedup=results["speedup"])


def in_float32(prompts, index, args, draft):
    """measure.lossless() of the prompts of these numbers in float32; None where the engine can't serve that."""
    exact = argparse.Namespace(**vars(args) | {"eval_dtype": "float32", "eval_concurrency": [8], "eval_sampled": 0, "max_failed": 1})
    found = None
    try:
        for setting in (MAIN, None):
            drafted, found = found, measure.one_pass(args.out / f"pass-float32-{setting or 'plain'}.json", [prompts[i] for i in index], exact,
                                                     draft, setting, found)
    except Refused as reason:
        progress.log(f"float32 is not served here, so the outputs are compared in {args.eval_dtype}: {reason}")
        return None
    for difference in found["differences"]:
        difference["prompt"] = index[difference["prompt"]]
    return measure.lossless(drafted, found, "8", "float32")


def agree(results):
    """Refuse if the server accepts other lengths of the draft than the trainer's model gets on the same answers: a draft
    that is served in another way than it was trained.  Proposals past the end of an answer, which only the server knows, do
    not count.  Wider where the server's texts differ (bf16): 1.40 and 1.39 on an H200 with a quarter of them equal."""
    if isinstance(results["walked"], str):
        return
    allowed = 0.05 if results["identical_outputs"] == 1 else 0.15
    for name, r in results["sets"].items():
        walked = results["walked"]["trained"][name]
        if abs(walked - r["within_answers"]) > allowed:
            raise Refused(f"{name}: the server's acceptance length is {r['within_answers']}, the trainer's model gets {walked} "
                          "on the same answers: the draft is not served as it was trained")


if __name__ == "__main__":
    stage.run(main)
