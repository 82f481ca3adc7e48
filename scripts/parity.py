"""Whether extracted states are the target's own: before the first row is kept, and on a random sample at the end.

Tiers: the most likely next token by final norm and head of the stored states against the server's own, at every position;
where the target fits in memory, the states against transformers in float32 and in the server's precision.
"""
import random

import progress
import states
from api import each
from stage import Refused

AGREEMENT = 0.95   # of top-1 tokens; bf16 storage alone costs 0.25 % (2364 of 2370), a wrong convention leaves 6 %
PARITY = 1.2       # median error against float32, at most this multiple of transformers' in the same precision
EXACT = 1e-5       # median error allowed in float32, where transformers in the same precision has none
SAMPLE = 4         # rows that are checked before the first one is kept
AGAIN = (4, 64)    # rows asked for again at the end: 1 %, at least and at most
APART = 0.25       # relative error that nine of ten tokens of a row asked for twice keep below: bf16 gave 0.07 at most
                   # twice over, fp8 adds 0.03; another token's states are 1.4 away
MARGIN = 100       # a state's norm may leave the sample's range by this factor (first tokens are 1,000 times others)
CLOSE = 8          # the server's next token is among so many of the stored state's best: near ties are no fault


def before(client, data, head):
    """Compare a few rows with the server's own top-1 tokens; refuse on disagreement.  Returns (report, {row: bf16 states}) and
    sets client.limits."""
    import torch

    progress.phase("checking parity")
    rows = sorted(range(min(64, len(data))), key=lambda row: data[row]["seq_len"])[-SAMPLE:]
    found, norms, agree, positions, cost = {}, [], 0, 0, []

    def ask(row):
        with client.states(row, data[row]["input_ids"], fp8=False, return_logprob=True, top_logprobs_num=1,
                           logprob_start_len=0) as (_, checked, reply):
            return row, checked["hidden_states"].clone(), checked["norms"], reply["meta_info"]

    for row, hidden, norm, info in each(ask, rows, SAMPLE):  # at once, so that the server has a batch to take apart
        found[row] = hidden
        norms.append(norm)
        own = [top[0][1] for top in info["input_top_logprobs"][1:]]  # at position t: its guess of token t
        own.append(info["output_top_logprobs"][0][0][1])
        logits = head.logits(hidden[:, 3])
        agree += (logits.argmax(-1) == torch.tensor(own)).sum().item()
        positions += len(own)
        if client.store.fp8:
            cost.append(rounding(hidden, logits, head))
    report = {"rows": len(rows), "positions": positions, "top1_agreement": round(agree / positions, 4), "transformers": "not run"}
    progress.log(f"parity: top-1 by the stored states agrees with the server's at {agree} of {positions} positions")
    if agree < AGREEMENT * positions:
        raise Refused(f"the stored states give the server's own next token at {agree} of {positions} positions, wanted "
                      f"{AGREEMENT:.0%}: norm convention or alignment is wrong for this target")
    if cost:
        kl, same = (torch.cat(x).float().mean().item() for x in zip(*cost))
        report["fp8"] = {"kl": kl, "top1_agreement": round(same, 4)}
        progress.log(f"fp8: KL(bf16 || fp8) {kl:.2g} nats a token, the same top-1 at {same:.2%} of {positions} positions")
    norms = torch.cat(norms)
    client.limits = (norms.amin(0) / MARGIN, norms.amax(0) * MARGIN)
    return report, found


def rounding(hidden, logits, head):
    """What fp8 costs the target's own distribution: KL [T] in nats, and whether the top-1 token [T] stays."""
    from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

    rounded = head.logits(dequantize_fp8_tensor(*quantize_tensor_to_fp8(hidden))[:, 3])
    p, q = logits.log_softmax(-1), rounded.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)


def next_token(path, data, reply, head):
    """Refuse a file whose last state does not lead to the token that the server chose."""
    last = states.decoded(data)[-1:, 3]
    best = head.logits(last)[0].topk(CLOSE).indices.tolist()
    if reply["output_ids"][0] not in best:
        raise Refused(f"{path.name}: the server's next token is {reply['output_ids'][0]}, the stored state's are {best}")


def after(client, data, rows, store):
    """Ask for a random sample of the published rows again, one at a time, and compare.  Returns the report."""
    import torch

    rows = random.sample(rows, min(len(rows), max(AGAIN[0], min(AGAIN[1], len(rows) // 100))))
    progress.phase("checking a random sample", len(rows), "row")
    worst = 0.0
    for row in rows:
        ids = data[row]["input_ids"]
        kept = states.check(states.file_of(store.out, row), ids, store.hidden_size, store.fp8)
        with client.states(row, ids) as (_, again, _):
            errors = states.token_errors(states.decoded(kept), states.decoded(again))
        error = torch.quantile(errors.amax(-1), 0.9).item()
        worst = max(worst, error)
        if error > APART:
            raise Refused(f"row {row}: its states alone are others than those kept (relative error {error:.2g})")
        progress.advance(error=f"{worst:.2g}")
    return {"rows": len(rows), "error": worst}


def against_transformers(found, data, model, dtype, layers):
    """Median and largest per-token error of each slot against float32, and transformers' own in the server's precision."""
    import torch

    exact, same = states.reference(model, torch.float32), states.reference(model, getattr(torch, dtype))
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
        progress.log(f"parity: {name}: median error against float32 {r['median']:.2g}, transformers in {dtype} "
                     f"{r['transformers_median']:.2g}")
        if r["median"] > PARITY * r["transformers_median"] + EXACT:
            raise Refused(f"{name}: median error {r['median']:.2g} against float32, more than {PARITY} times the "
                          f"{r['transformers_median']:.2g} of transformers in {dtype}")
    return report
