"""The draft's vocabulary: the K tokens that are trained most often, and what share of the trained tokens they cover."""
import hashlib
import io
from itertools import accumulate

import stage
from stage import Refused


def save_counts(counts, path):
    """{token id: times trained} as speculators stores it."""
    import torch

    torch.save(dict(counts), data := io.BytesIO())
    stage.write(path, data.getvalue())


def load_counts(path):
    import torch

    return torch.load(path, weights_only=True)


def ranked(counts, always=()):
    """The tokens by how often they are trained, those of `always` first."""
    return sorted({*counts, *always}, key=lambda t: (t not in always, -counts.get(t, 0), t))


def coverage(counts, ranking=None):
    """[[K, share of the counted tokens that the first K of `ranking` (default: their own) cover]], K = 1, 2, 4 ... and all."""
    ranking = ranking or ranked(counts)
    cumulated = list(accumulate(counts.get(t, 0) for t in ranking))
    sizes = [2 ** k for k in range(32) if 2 ** k < len(cumulated)] + [len(cumulated)]
    return [[k, round(cumulated[k - 1] / max(1, sum(counts.values())), 5)] for k in sizes]


def size_for(counts, share, always=()):
    """The fewest tokens, those of `always` among them, that cover this share of the counted ones."""
    needed = share * sum(counts.values()) - 1e-6
    return next(k for k, n in enumerate(accumulate(counts.get(t, 0) for t in ranked(counts, always)), 1) if n >= needed and k >= len(always))


def mapping(counts, size, target_size, always=()):
    """(d2t int64 [K], t2d bool [V]) of a draft vocabulary of `size` tokens out of `target_size`.

    d2t is an offset: draft token i is target token i + d2t[i].  The tokens of `always` (end of turn, trained special
    tokens) are in, whatever their count: a draft without them never proposes to stop.  Built by speculators' own function, which fills up with
    low ids where fewer distinct tokens were trained.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    always = [t for t in always if t < target_size]
    if not max(1, len(always)) <= size <= target_size:
        raise Refused(f"--draft-vocab {size}: the target has {target_size} tokens, {len(always)} of them always in")
    top = max(counts.values(), default=0)
    counts = {t: n for t, n in counts.items() if t < target_size} | {t: top + 1 for t in always}
    return build_vocab_mappings_from_distribution(counts, size, target_size)


def covered(counts, t2d):
    """Share of the counted tokens that are in the draft's vocabulary: the ceiling of its first proposal's acceptance."""
    return sum(n for t, n in counts.items() if t < len(t2d) and t2d[t]) / max(1, sum(counts.values()))


def ceiling(counts, held_out, t2d, steps):
    """What the draft's vocabulary allows at best, by the held-out tokens where there are some: a sentence."""
    seen = covered(held_out or counts, t2d)
    return (f"draft vocabulary of {int(t2d.sum())} tokens covers {covered(counts, t2d):.2%} of the trained tokens"
            + f", {seen:.2%} of the held-out ones" * bool(held_out)
            + f": an acceptance length of at most {sum(seen ** k for k in range(steps + 1)):.2f} of {steps + 1}")


def identity(d2t):
    """Hash of a draft vocabulary."""
    return hashlib.sha256(d2t.numpy().tobytes()).hexdigest()[:16]
