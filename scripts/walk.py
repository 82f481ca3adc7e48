"""Walk greedy answers as a speculating server does, with proposals known for every position, and count what is accepted.

At position j the server holds token j + 1 and asks the draft for `steps` further ones; it accepts the first a that
equal its own greedy tokens, adds one of its own, and goes on at j + a + 1.  An acceptance length is 1 + the mean of a.
Every draft whose proposals can be computed offline is judged so: the trained one (where this must agree with what the
server measures), an untrained one, and the most frequent token for ever.
"""
from collections import Counter
from itertools import groupby


def walk(proposals, ids, prompt_length):
    """How often a proposals were accepted, {a: count}, on one row.

    proposals[k][j]: token proposed for position j + 2 + k when the draft has read up to j; ids: prompt and greedy answer.
    """
    accepted, j = Counter(), prompt_length - 1
    while j + 2 < len(ids):
        a = 0
        while a < len(proposals) and j + 2 + a < len(ids) and proposals[a][j] == ids[j + 2 + a]:
            a += 1
        accepted[a] += 1
        j += a + 1
    return accepted


def answers(proposals, ids, mask):
    """walk() over each answer of a conversation: the runs of ones in its loss mask."""
    accepted, end = Counter(), 0
    for answer, run in groupby(mask):
        start, end = end, end + len(list(run))
        if answer:
            accepted += walk(proposals, ids[:end], max(1, start))
    return accepted


def acceptance_length(accepted):
    """1 + accepted proposals per verification, pooled: {a: count} or a list of counts."""
    pairs = list(accepted.items() if isinstance(accepted, dict) else enumerate(accepted))
    return 1 + sum(a * n for a, n in pairs) / max(1, sum(n for _, n in pairs))


def by_position(accepted, steps=3):
    """Share of verifications that accepted at least 1, 2 .. `steps` proposals."""
    pairs = list(accepted.items() if isinstance(accepted, dict) else enumerate(accepted))
    total = max(1, sum(n for _, n in pairs))
    return [round(sum(n for a, n in pairs if a >= k) / total, 4) for k in range(1, steps + 1)]


def conditional(accepted, steps=3):
    """Share of verifications that accepted proposal 1, 2 .. `steps`, of those that accepted the ones before it."""
    reached = [1.0, *by_position(accepted, steps)]
    return [round(b / a, 4) if a else 0.0 for a, b in zip(reached, reached[1:])]


def interval(prompts, sets=None, draws=2000):
    """95 % bootstrap interval [low, high] of the pooled acceptance length: whole prompts are drawn anew, as many of each set.

    prompts: (verifications, accepted proposals) of each; sets: the set of each.  Verifications of one answer resemble each
    other, so an interval over them would be too narrow."""
    import numpy

    counts, chance = numpy.array(prompts or [(0, 0)], float), numpy.random.default_rng(0)
    sets = numpy.array(sets or [""] * len(counts))
    sums = sum(own[chance.integers(len(own), size=(draws, len(own)))].sum(1) for own in (counts[sets == s] for s in numpy.unique(sets)))
    lengths = 1 + sums[:, 1] / numpy.maximum(sums[:, 0], 1)
    return [round(float(q), 3) for q in numpy.quantile(lengths, [0.025, 0.975])]


def drafts(args, made, prompts, plain):
    """Acceptance lengths on the greedy answers, by set, of: the trainer's model, an untrained one, the most frequent token; or
    why there are none."""
    import torch

    import progress
    import stage
    import states
    import trainer

    device = states.reference_device(args.model)
    if not device or not made:
        return "this draft was not made by 04_train" if device else "the target does not fit in this machine's memory twice"
    progress.phase("loading the target in transformers")
    target = states.reference(args.model, torch.float32, device)
    trained = trainer.load_draft(args.draft / "draft", args.model).to(device)
    untrained = trainer.build_draft(args.model, made["layer_ids"], trained.d2t.cpu(), trained.t2d.cpu(), 3, attention="sdpa")
    known = {"trained": trained, "untrained": untrained.to(device).eval()}
    accepted = {draft: {p["set"]: Counter() for p in prompts} for draft in (*known, "most_frequent_token")}
    progress.phase("walking the answers with the trainer's model", len(prompts), "prompt")
    for prompt, row in zip(prompts, plain):
        stage.check_stop()
        ids = prompt["ids"] + row.get("ids", [])
        aux = target(ids, made["layer_ids"])[:, :3].flatten(1)
        proposals = {name: [(step + trained.d2t[step]).tolist() for step in
                            trainer.unroll(draft, torch.tensor(ids, device=device), aux, 3)] for name, draft in known.items()}
        proposals["most_frequent_token"] = [[made["most_frequent_token"]] * len(ids)] * 3
        for name, proposed in proposals.items():
            accepted[name][prompt["set"]] += walk(proposed, ids, len(prompt["ids"]))
        progress.advance()
    return {draft: {name: round(acceptance_length(a), 3) for name, a in by_set.items()} for draft, by_set in accepted.items()}
