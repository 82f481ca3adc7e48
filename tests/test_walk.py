"""Acceptance counted offline: against examples by hand and against a server simulated token by token."""
import random
from collections import Counter

import pytest

import walk

IDS = [9, 9, 1, 2, 3, 4, 5, 6, 7, 8]                              # a prompt of 2 and an answer of 8


def always(ids, steps=3):
    """Proposals that are always right: [k][j] is the token at j + 2 + k."""
    return [ids[2 + k:] + [-1] * (2 + k) for k in range(steps)]


def test_proposals_that_are_always_right_are_accepted_in_full():
    # the prompt's own forward gives 1; then 2 3 4 are accepted and 5 added; then 6 7 8 end the answer
    assert walk.walk(always(IDS), IDS, 2) == {3: 2}


def test_proposals_that_are_always_wrong_give_one_token_a_verification():
    assert walk.walk([[0] * 10] * 3, IDS, 2) == {0: 7}            # 1 by the prompt, 2 .. 8 one by one


def test_a_wrong_second_proposal_ends_the_acceptance_though_the_third_is_right():
    proposals = always(IDS)
    proposals[1] = [0] * 10
    assert walk.walk(proposals, IDS, 2) == {1: 4}                 # 2+3, 4+5, 6+7, 8


def test_proposals_beyond_the_end_of_the_answer_are_not_counted():
    proposals = always(IDS + [50, 51, 52])
    assert walk.walk(proposals, IDS[:5], 2) == {2: 1}             # 1 by the prompt; 2 3 accepted, then the answer is over


@pytest.mark.parametrize("ids, prompt", [([9, 9], 2), ([9, 9, 1], 2)])
def test_an_answer_of_no_or_one_token_is_never_verified(ids, prompt):
    assert walk.walk(always(ids), ids, prompt) == {}


def test_proposals_are_read_at_the_last_position_that_the_draft_has_seen():
    proposals = [[0] * 10 for _ in range(3)]
    proposals[0][1] = 2                                           # read up to position 1, token 1 in hand, 2 proposed
    assert walk.walk(proposals, IDS, 2) == {1: 1, 0: 5}


def test_acceptance_length_is_one_plus_the_mean_over_all_verifications():
    assert walk.acceptance_length({0: 1, 3: 1}) == 2.5
    assert walk.acceptance_length([1, 0, 0, 1]) == 2.5            # as counts by number accepted
    assert walk.acceptance_length({0: 3, 1: 1}) == 1.25
    assert walk.acceptance_length(Counter()) == 1


def test_by_position_is_the_share_that_accepted_at_least_so_many():
    assert walk.by_position({0: 2, 1: 1, 3: 1}) == [0.5, 0.25, 0.25]
    assert walk.by_position([2, 1, 0, 1]) == [0.5, 0.25, 0.25]
    assert walk.by_position({0: 1, 1: 3}, steps=2) == [0.75, 0.0]


def test_the_positions_add_up_to_the_acceptance_length():
    accepted = {0: 7, 1: 5, 2: 3, 3: 1}
    assert walk.acceptance_length(accepted) == pytest.approx(1 + sum(walk.by_position(accepted)))


def test_one_token_proposed_for_ever_is_accepted_where_the_answer_repeats_it():
    ids = [9, 5, 5, 5, 5, 5, 7, 5]
    # 5 by the prompt; 5 5 5 accepted and 5 added; 5 is wrong for 7, which is added; the last 5 is accepted
    assert walk.walk([[5] * len(ids)] * 3, ids, 1) == {3: 1, 0: 1, 1: 1}


def served(proposals, ids, prompt_length):
    """What a server does, one token at a time, and obviously so: it owns a text and a draft that has read all of the
    text but its last token."""
    counts = []
    text = ids[:prompt_length + 1]                                # the prompt's forward gives the answer's first token
    while len(text) < len(ids):
        read_up_to = len(text) - 2
        proposed = [p[read_up_to] for p in proposals]
        accepted = 0
        for token in proposed:
            if len(text) == len(ids) or token != ids[len(text)]:  # the target's own greedy token there
                break
            text = text + [token]
            accepted += 1
        if len(text) < len(ids):
            text = text + [ids[len(text)]]                        # the token that the verification gives for nothing
        counts.append(accepted)
    return Counter(counts)


@pytest.mark.parametrize("seed", range(60))
def test_the_walk_agrees_with_a_server_simulated_token_by_token(seed):
    chance = random.Random(seed)
    alphabet, steps, length = chance.choice([2, 3, 5]), chance.randint(1, 5), chance.randint(2, 80)
    ids = [chance.randrange(alphabet) for _ in range(length)]
    proposals = [[chance.randrange(alphabet) for _ in range(length)] for _ in range(steps)]
    prompt_length = chance.randint(1, length - 1)
    assert walk.walk(proposals, ids, prompt_length) == served(proposals, ids, prompt_length)
