"""The draft's vocabulary: the K tokens that are trained most often, and what share of the trained tokens they cover."""
from itertools import accumulate

from stage import Refused


def save_counts(counts, path):
    """{token id: times trained} as speculators stores it."""
    import torch

    temporary = path.with_name(f".{path.name}.tmp")
    torch.save(dict(counts), temporary)
    temporary.replace(path)


def load_counts(path):
    import torch

    return torch.load(path, weights_only=True)


def coverage(counts):
    """[[K, share of trained tokens covered by the K most frequent]] for K = 1, 2, 4 ... and all."""
    total = sum(counts.values())
    cumulated = list(accumulate(sorted(counts.values(), reverse=True)))
    sizes = [2 ** k for k in range(32) if 2 ** k < len(cumulated)] + [len(cumulated)]
    return [[k, round(cumulated[k - 1] / total, 5)] for k in sizes]


def draw_coverage(counts, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = coverage(counts)
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.semilogx([k for k, _ in points], [share for _, share in points], marker="o", base=2)
    axes.set(xlabel="draft vocabulary (most frequent tokens)", ylabel="share of trained tokens covered", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def mapping(counts, size, target_size, always=()):
    """(d2t int64 [K], t2d bool [V]) of a draft vocabulary of `size` tokens out of `target_size`.

    d2t is an offset: draft token i is target token i + d2t[i].  The tokens of `always` (end of turn) are in, whatever
    their count: a draft without them never proposes to stop.  Built by speculators' own function, which fills up with
    low ids where fewer distinct tokens were trained.
    """
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    if not 0 < size <= target_size:
        raise Refused(f"--draft-vocab {size}: the target has {target_size} tokens")
    top = max(counts.values(), default=0)
    counts = {t: n for t, n in counts.items() if t < target_size} | {t: top + 1 for t in always}
    return build_vocab_mappings_from_distribution(counts, size, target_size)


def covered(counts, t2d):
    """Share of the counted tokens that are in the draft's vocabulary: the ceiling of its first proposal's acceptance."""
    return sum(n for t, n in counts.items() if t2d[t]) / max(1, sum(counts.values()))


def identity(d2t):
    """Hash of a draft vocabulary."""
    import hashlib

    return hashlib.sha256(d2t.numpy().tobytes()).hexdigest()[:16]
