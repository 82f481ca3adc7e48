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

