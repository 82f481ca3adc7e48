"""Run every sample through the target in SGLang once and keep the hidden states that the draft is trained on.

Example
    python scripts/03_extract.py --tokens runs/try/02_prepare --model models/smollm2-135m --out runs/try/03_extract

Reads   --tokens    02_prepare/dataset, contract.json
        --model     the target, served here by a SGLang with `make patch` applied
Writes  hs_{row}.safetensors   hidden_states bfloat16 [T, 4, H], token_ids int64 [T] (speculators' layout)
        parity.json            how the states compare with the target's own answers and with transformers
        contract.json          completed by layers, their meaning, precision, engine
        done.json

Before the first row the hand-over is checked in tiers: the most likely next token by final norm and head of the stored
states against the server's own, at every position; where the target fits in memory, the states against transformers in
float32 and in the same precision.  A file is checked (ids, shape, finite) before it gets its name; resuming looks at
what is there.  CONCURRENCY (environment, default 16) requests are in flight.
"""
import json
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import contract
import progress
import stage
import states
from api import Api, Rejected, each, in_flight
from sglang_server import PATCHES, serve
from stage import Refused

AGREEMENT = 0.95   # of top-1 tokens; bf16 storage alone costs 0.25 % (2364 of 2370), a wrong convention leaves 6 %
PARITY = 1.2       # median error against float32, at most this multiple of transformers' in the same precision
EXACT = 1e-5       # median error allowed in float32, where transformers in the same precision has none
SAMPLE = 4         # rows that are checked before the first one is kept


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--layer-ids", type=lambda t: [int(i) for i in t.split(",")], default=None,
                   help="three layers whose entering states the draft reads (default 2,n/2,n-3)")
    p.add_argument("--extract-dtype", default="bfloat16", help="the server's precision; files are bfloat16 (default bfloat16)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "checking what", "starting SGLang", "checking parity", "extracting", "stopping SGLang")
    progress.phase("loading libraries")
    from datasets import load_from_disk

    contract.check(args.tokens, target=stage.model_identity(args.model))
    config = contract.text_config(args.model)
    layers = contract.layer_ids(args.model, args.layer_ids)
    head = states.Head(args.model)
    data = load_from_disk(args.tokens / "dataset").with_format(None)
    progress.plan(("checking what", len(data)), "starting SGLang", "checking parity", ("extracting", len(data)), "stopping SGLang", rows=len(data))
    missing = look_at_what_is_there(data, out, config.hidden_size)
    room(sum(data[row]["seq_len"] for row in missing) * 4 * config.hidden_size * 2, out)
    for left in out.glob(".staging-*"):  # of a run that was killed
        shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=out))  # private (0700), and a rename away from its place
    try:
        if missing:
            with serve(args.model, stage.part_log(out, "sglang"), args.extract_dtype, capture=hooks(staging, layers),
                       cache_prefixes=False, max_requests=in_flight(16)) as url:
                fetch = fetcher(Api(url), data, staging, config.hidden_size)
                check_parity(fetch, data, args, layers, head, out)  # of every server, also of one that resumes
                extract(fetch, missing, len(data), out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    contract.write(out, args.tokens, layer_ids=layers, layer_meaning=contract.STATE, last_state=contract.LAST,
                   dtype=args.extract_dtype, engine=f"sglang {version('sglang')}",
                   rope=getattr(config, "rope_parameters", None))
    stage.finish(out, len(data), len(data), {}, bytes=sum(f.stat().st_size for f in out.glob("hs_*.safetensors")),
                 parity=json.loads((out / "parity.json").read_text()))


def hooks(staging, layers):
    import sys
    sys.path.insert(0, str(PATCHES))
    from hidden_states_hook import forward_hooks

    return forward_hooks(str(staging.resolve()), layers)


def look_at_what_is_there(data, out, hidden_size):
    """Rows that still have to be extracted; broken files are removed."""
    progress.phase("checking what is there", len(data), "row")
    missing = []
    for row, ids in enumerate(data["input_ids"]):
        stage.check_stop()
        path = states.file_of(out, row)
        if not path.exists():
            missing.append(row)
        elif not states.intact(path, ids, hidden_size):
            progress.log(f"{path.name} is broken; it is made again")
            path.unlink()
            missing.append(row)
        progress.advance()
    return missing


def room(needed, out):
    free = shutil.disk_usage(out).free
    progress.log(f"{needed / 1e9:.2f} GB of states to come, {free / 1e9:.0f} GB free")
    if needed > free:
        raise Refused(f"{out} has {free / 1e9:.1f} GB free, the states need {needed / 1e9:.1f} GB")


def fetcher(api, data, staging, hidden_size, deadline=600.0):
    """A function row -> (path of its checked file in staging, states, the server's reply)."""

    def fetch(row, **more):
        ids = list(data[row]["input_ids"])
        rid = f"hs-{row}-{len(ids)}-{time.monotonic_ns() % 1000000}"
        try:
            reply = api.post("/generate", {"input_ids": ids, "rid": rid, **more,
                                           "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}})
        except Rejected as rejection:
            raise Refused(f"row {row} of {len(ids)} tokens: the server answers {rejection}") from None
        path, failed = staging / f"{rid}.safetensors", staging / f"{rid}.err"
        until = time.monotonic() + deadline
        while not path.exists():
            if failed.exists():
                raise Refused(f"row {row}: {failed.read_text().strip()}")
            if time.monotonic() > until:
                raise Refused(f"row {row}: the server answered but wrote no states within {deadline:.0f} s")
            time.sleep(0.005)
        if reply["meta_info"].get("cached_tokens"):
            raise Refused(f"row {row}: the server took {reply['meta_info']['cached_tokens']} tokens from its prefix cache")
        return path, states.check(path, ids, hidden_size)["hidden_states"], reply

    return fetch


def extract(fetch, missing, total, out):
    progress.phase("extracting", total, "row", done=total - len(missing), flight=in_flight(16))
    started, tokens = time.monotonic(), 0

    def keep(row):
        path, hidden, _ = fetch(row)
        states.publish(path, states.file_of(out, row))
        return len(hidden)

    for length in each(keep, missing, in_flight(16)):
        tokens += length
        progress.advance(tok_per_s=round(tokens / (time.monotonic() - started)))


def check_parity(fetch, data, args, layers, head, out):
    """Compare a few rows with the server's own top-1 tokens and with transformers; refuse on disagreement."""
    import torch

    progress.phase("checking parity")
    rows = sorted(range(min(64, len(data))), key=lambda row: data[row]["seq_len"])[-SAMPLE:]
    found, agree, positions = {}, 0, 0

    def ask(row):
        return row, *fetch(row, return_logprob=True, top_logprobs_num=1, logprob_start_len=0)

    for row, path, hidden, reply in each(ask, rows, SAMPLE):  # at once, so that the server has a batch to take apart
        path.unlink()
        found[row] = hidden
        own = [top[0][1] for top in reply["meta_info"]["input_top_logprobs"][1:]]  # at position t: its guess of token t
        own.append(reply["meta_info"]["output_top_logprobs"][0][0][1])
        agree += (head.logits(hidden[:, 3]).argmax(-1) == torch.tensor(own)).sum().item()
        positions += len(own)
    report = {"rows": len(rows), "positions": positions, "top1_agreement": round(agree / positions, 4), "transformers": "not run"}
    progress.log(f"parity: top-1 by the stored states agrees with the server's at {agree} of {positions} positions")
    if agree < AGREEMENT * positions:
        raise Refused(f"the stored states give the server's own next token at {agree} of {positions} positions, wanted "
                      f"{AGREEMENT:.0%}: norm convention or alignment is wrong for this target")
    if (out / "parity.json").exists():
        return
    if states.reference_device(args.model, allowed=("cpu",)):  # the GPU is the server's
        report["transformers"] = against_transformers(found, data, args, layers)
    stage.write(out / "parity.json", json.dumps(report, indent=1) + "\n")


def against_transformers(found, data, args, layers):
    """Median and largest per-token error of each slot against float32, and transformers' own in the server's precision."""
    import torch

    dtype = getattr(torch, args.extract_dtype)
    exact, same = states.reference(args.model, torch.float32), states.reference(args.model, dtype)
    ours, theirs = [], []
    for row, hidden in found.items():
        ids = list(data[row]["input_ids"])
        wanted = exact(ids, layers)
        ours.append(states.token_errors(hidden, wanted))
        theirs.append(states.token_errors(same(ids, layers).to(torch.bfloat16), wanted))  # stored alike
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    names = [*(f"layer {i}" for i in layers), "last"]
    report = {name: {"median": ours[:, k].median().item(), "max": ours[:, k].max().item(),
                     "transformers_median": theirs[:, k].median().item()} for k, name in enumerate(names)}
    for name, r in report.items():
        progress.log(f"parity: {name}: median error against float32 {r['median']:.2g}, transformers in {args.extract_dtype} "
                     f"{r['transformers_median']:.2g}")
        if r["median"] > PARITY * r["transformers_median"] + EXACT:
            raise Refused(f"{name}: median error {r['median']:.2g} against float32, more than {PARITY} times the "
                          f"{r['transformers_median']:.2g} of transformers in {args.extract_dtype}")
    return report


if __name__ == "__main__":
    stage.run(main)
