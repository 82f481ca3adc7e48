"""Serve the target with and without the draft on the same prompts: acceptance length, speed, same output.

Example
    python scripts/05_eval.py --draft runs/try/base/04_train --model models/smollm2-135m \\
        --eval-prompts runs/try/02_prepare/heldout.jsonl models/humaneval.jsonl --out runs/try/base/05_eval

Reads   --draft          04_train: sglang/, draft/, contract.json
        --model          the target
        --eval-prompts   files of {"id", "messages"} or {"prompt"} lines, each a set of its own
Writes  plain.json       the greedy answers without the draft, with their timing
        drafted.json     with it, and the server's counts of accepted proposals
        rows.jsonl       one row a prompt: set, id, tokens, acceptance length, identical
        results.json     acceptance_length, acceptance_by_position, tokens_per_s, tokens_per_s_baseline, speedup,
                         identical_outputs, prompts; the same for each set; what other drafts get on the same answers
        report.md, acceptance.png
        done.json

Acceptance length: 1 + accepted proposals per verification, pooled over all verifications, from the server's own counts;
chain of 3 proposals, top-k 1, temperature 0.  Where the target fits in memory, the greedy answers are also walked with
the trainer's model: it must agree with the server (walk.py).
"""
import json
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import chat
import contract
import progress
import report
import stage
import states
import walk
from api import Api, each
from jsonl import read
from sglang_server import serve
from stage import Refused


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--draft", type=Path, required=True, help="04_train's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--eval-prompts", type=Path, nargs="+", required=True, help="one file a set of prompts")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--eval-rows", type=int, default=80, help="prompts of each set, from its start (default 80)")
    p.add_argument("--eval-tokens", type=int, default=512, help="most tokens of an answer (default 512)")
    p.add_argument("--eval-concurrency", type=int, default=8, help="requests in flight (default 8)")
    p.add_argument("--eval-dtype", default="bfloat16", help="float32: outputs should be identical (default bfloat16)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", *["starting SGLang", "answering", "stopping SGLang"] * 2, "loading the target", "walking")
    progress.phase("loading libraries")
    made = contract.check(args.draft, target=stage.model_identity(args.model), tokenizer=contract.tokenizer_hash(args.model))
    tokenizer = chat.load_tokenizer(args.model)
    prompts = [prompt for path in args.eval_prompts for prompt in prompts_of(path, tokenizer, args.eval_rows)]

    passes = [name for name in ("plain", "drafted") if not (out / f"{name}.json").exists()]
    progress.plan(*["starting SGLang", ("answering", len(prompts)), "stopping SGLang"] * len(passes),
                  "loading the target", ("walking", len(prompts)))
    plain = answers(out / "plain.json", prompts, args, draft=None)
    drafted = answers(out / "drafted.json", prompts, args, draft=args.draft / "sglang")
    if not any(row["accepted"] for row in drafted["rows"]):
        raise Refused(f"{stage.part_log(out, 'sglang')}: the server reports no verification; it did not use the draft")
    results = summarize(prompts, plain, drafted)
    results["walked"] = other_drafts(args, made, prompts, plain) if states.reference_device(args.model) else "not run"
    results["settings"] = {"steps": 3, "top_k": 1, "temperature": 0, "max_tokens": args.eval_tokens, "dtype": args.eval_dtype,
                           "concurrency": args.eval_concurrency, "engine": f"sglang {version('sglang')}"}
    stage.write(out / "results.json", json.dumps(results, indent=1) + "\n")
    rows = [{"set": p["set"], "id": p["id"], "tokens": len(d["ids"]), "identical": a["ids"] == d["ids"],
             "acceptance_length": round(walk.acceptance_length(d["accepted"]), 3)}
            for p, a, d in zip(prompts, plain["rows"], drafted["rows"])]
    stage.write(out / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    report.write(results, out)
    for name, r in {"all": results, **results["sets"]}.items():
        progress.log(f"{name}: acceptance length {r['acceptance_length']}  speed-up {r['speedup']}  "
                     f"identical {r['identical_outputs']:.0%} of {r['prompts']}")
    agree(results)
    stage.finish(out, len(prompts), len(prompts), {}, acceptance_length=results["acceptance_length"], speedup=results["speedup"])


def prompts_of(path, tokenizer, limit):
    """[{set, id, ids}] of a file: prompts rendered by the target's chat template."""
    found = []
    for number, row in read(path):
        try:
            ids = chat.render(tokenizer, chat.question(row, f"{path} line {number}"), answer_next=True)
        except chat.Dropped as reason:
            raise Refused(f"{path} line {number}: {reason}") from None
        found.append({"set": path.stem, "id": str(row.get("id", number)), "ids": ids})
        if len(found) == limit:
            break
    if not found:
        raise Refused(f"{path} holds no prompt")
    return found


def answers(path, prompts, args, draft):
    """Greedy answers of all prompts by one server, kept in `path`: {seconds by set, rows: [{ids, accepted}]}.

    The pass is timed as a whole, so an interrupted one starts anew.
    """
    name = "with the draft" if draft else "without the draft"
    if path.exists():
        progress.log(f"{path.name} is there: the pass {name} is not repeated")
        return json.loads(path.read_text())
    rows, seconds = [None] * len(prompts), {}
    with serve(args.model, stage.part_log(path.parent, "sglang"), args.eval_dtype, draft=draft,
               cache_prefixes=False, max_requests=args.eval_concurrency, wait_for=f"starting SGLang {name}") as url:
        api = Api(url)

        def ask(index, tokens=args.eval_tokens):
            reply = api.post("/generate", {"input_ids": prompts[index]["ids"],
                                           "sampling_params": {"max_new_tokens": tokens, "temperature": 0}})
            return index, {"ids": reply["output_ids"], "accepted": reply["meta_info"].get("spec_correct_drafts_histogram") or []}

        ask(0, tokens=8)  # warm
        progress.phase(f"answering {name}", len(prompts), "prompt", flight=args.eval_concurrency)
        for subset in dict.fromkeys(p["set"] for p in prompts):
            started = time.monotonic()
            for index, row in each(ask, [i for i, p in enumerate(prompts) if p["set"] == subset], args.eval_concurrency):
                rows[index] = row
                progress.advance()
            seconds[subset] = time.monotonic() - started
    result = {"seconds": seconds, "rows": rows}
    stage.write(path, json.dumps(result))
    return result


def summarize(prompts, plain, drafted):
    """Figures of all prompts, and of each set under "sets"."""

    def figures(sets):
        index = [i for i, p in enumerate(prompts) if p["set"] in sets]
        accepted = Counter()
        for i in index:
            accepted.update(dict(enumerate(drafted["rows"][i]["accepted"])))
        speeds = [sum(len(run["rows"][i]["ids"]) for i in index) / sum(run["seconds"][s] for s in sets)
                  for run in (drafted, plain)]
        same = sum(plain["rows"][i]["ids"] == drafted["rows"][i]["ids"] for i in index)
        return {"acceptance_length": round(walk.acceptance_length(accepted), 3),
                "acceptance_by_position": walk.by_position(accepted), "accepted": [accepted[k] for k in range(4)],
                "tokens_per_s": round(speeds[0], 1), "tokens_per_s_baseline": round(speeds[1], 1),
                "speedup": round(speeds[0] / speeds[1], 3), "identical_outputs": round(same / len(index), 4),
                "prompts": len(index)}

    sets = list(dict.fromkeys(p["set"] for p in prompts))
    return {**figures(sets), "sets": {name: figures([name]) for name in sets}}


def agree(results):
    """Refuse if the server accepts other lengths of the draft than the trainer's model gets on the same answers: a draft
    that is served in another way than it was trained.  Wider where the server's texts differ (bf16): 1.40 and 1.39 on an
    H200 with a quarter of them equal."""
    if results["walked"] == "not run":
        return
    allowed = 0.05 if results["identical_outputs"] == 1 else 0.15
    for name, r in results["sets"].items():
        walked = results["walked"]["trained"][name]
        if abs(walked - r["acceptance_length"]) > allowed:
            raise Refused(f"{name}: the server's acceptance length is {r['acceptance_length']}, the trainer's model gets {walked} "
                          "on the same answers: the draft is not served as it was trained")


def other_drafts(args, made, prompts, plain):
    """Acceptance lengths on the greedy answers, by set, of: the trainer's model, an untrained one, the most frequent token."""
    import torch

    import trainer

    progress.phase("loading the target in transformers")
    device = states.reference_device(args.model)
    target = states.reference(args.model, torch.float32, device)
    trained = trainer.load_draft(args.draft / "draft", args.model).to(device)
    untrained = trainer.build_draft(args.model, made["layer_ids"], trained.d2t.cpu(), trained.t2d.cpu(), 3, attention="sdpa")
    drafts = {"trained": trained, "untrained": untrained.to(device).eval()}
    sets = list(dict.fromkeys(p["set"] for p in prompts))
    accepted = {draft: {name: Counter() for name in sets} for draft in (*drafts, "most_frequent_token")}
    progress.phase("walking the answers with the trainer's model", len(prompts), "prompt")
    for prompt, row in zip(prompts, plain["rows"]):
        stage.check_stop()
        ids = prompt["ids"] + row["ids"]
        aux = target(ids, made["layer_ids"])[:, :3].flatten(1)
        proposals = {name: [(step + trained.d2t[step]).tolist() for step in
                            trainer.unroll(draft, torch.tensor(ids, device=device), aux, 3)] for name, draft in drafts.items()}
        proposals["most_frequent_token"] = [[made["most_frequent_token"]] * len(ids)] * 3
        for name, proposed in proposals.items():
            accepted[name][prompt["set"]] += walk.walk(proposed, ids, len(prompt["ids"]))
        progress.advance()
    return {draft: {name: round(walk.acceptance_length(a), 3) for name, a in by_set.items()} for draft, by_set in accepted.items()}


if __name__ == "__main__":
    stage.run(main)
