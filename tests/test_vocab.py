"""The draft's vocabulary: the mapping and the coverage."""
import random

import pytest
import torch

import vocab
from stage import Refused

torch.set_num_threads(1)
V = 320


def counts(distinct=200, seed=0, top=V):
    chance = random.Random(seed)
    return {t: chance.randint(1, 1000) for t in chance.sample(range(top), distinct)}


def chosen(d2t):
    return [i + offset for i, offset in enumerate(d2t.tolist())]


@pytest.mark.parametrize("k, distinct", [(1, 200), (64, 200), (200, 200), (64, 10), (V, 200), (V, V), (50, 0)])
def test_the_mapping_rises_stays_in_range_and_agrees_with_its_inverse(k, distinct):
    d2t, t2d = vocab.mapping(counts(distinct), k, V)
    tokens = chosen(d2t)
    assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool and d2t.shape == (k,) and t2d.shape == (V,)
    assert tokens == sorted(set(tokens)) and 0 <= tokens[0] and tokens[-1] < V
    assert t2d.nonzero().flatten().tolist() == tokens


def test_the_most_frequent_tokens_are_chosen():
    found = counts()
    tokens = chosen(vocab.mapping(found, 64, V)[0])
    worst = min(found[t] for t in tokens)
    assert all(n <= worst for t, n in found.items() if t not in tokens)


def test_with_fewer_distinct_tokens_all_of_them_are_in():
    found = counts(10)
    assert set(found) <= set(chosen(vocab.mapping(found, 64, V)[0]))


def test_the_whole_vocabulary_maps_every_token_to_itself():
    d2t, t2d = vocab.mapping(counts(), V, V)
    assert not d2t.any() and t2d.all()


@pytest.mark.parametrize("k", [V + 1, 0, -1])
def test_a_size_that_the_target_does_not_have_is_refused_with_both_numbers(k):
    with pytest.raises(Refused, match=f"--draft-vocab {k}.*{V}"):
        vocab.mapping(counts(), k, V)


@pytest.mark.parametrize("k", [2, 64, 100])
def test_end_of_turn_tokens_are_in_even_if_they_were_never_or_rarely_trained(k):
    found = {t: 100 for t in range(100)} | {317: 1}
    assert {317, 319} <= set(chosen(vocab.mapping(found, k, V, always=[317, 319])[0]))


def test_counts_of_tokens_that_the_target_lacks_are_ignored():
    d2t, t2d = vocab.mapping({5: 1, V: 99, V + 7: 99}, 1, V)
    assert chosen(d2t) == [5] and t2d.sum() == 1


def test_the_callers_counts_are_left_as_they_were():
    found = counts()
    before = dict(found)
    vocab.mapping(found, 64, V, always=[2])
    assert found == before


def test_coverage_rises_and_ends_at_one():
    points = vocab.coverage(counts())
    sizes, shares = zip(*points)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == 200
    assert list(shares) == sorted(shares) and shares[-1] == 1.0
    assert all(0 < share <= 1 for share in shares)


def test_coverage_counts_the_most_frequent_first():
    assert vocab.coverage({3: 3, 7: 6, 9: 1}) == [[1, 0.6], [2, 0.9], [3, 1.0]]
    assert vocab.coverage({7: 5}) == [[1, 1.0]]


def test_covered_is_the_share_of_counts_inside_the_draft_vocabulary():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[[1, 2]] = True
    assert vocab.covered({1: 3, 2: 3, 4: 2}, t2d) == 0.75


def test_counts_of_tokens_beyond_the_target_are_never_covered():
    t2d = torch.ones(V, dtype=torch.bool)
    assert vocab.covered({1: 1, V + 3: 1}, t2d) == 0.5
    d2t, t2d = vocab.mapping({5: 1}, 2, V, always=[V, 7])
    assert chosen(d2t) == [5, 7]


def test_fewer_tokens_than_must_be_in_are_refused():
    with pytest.raises(Refused, match="--draft-vocab 2.*3 of them always in"):
        vocab.mapping(counts(), 2, V, always=[1, 2, 3])


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.995, 1.0])
def test_the_size_for_a_coverage_is_the_smallest_that_has_it(share):
    found, always = counts(), [317, 319]
    size = vocab.size_for(found, share, always)
    reached = vocab.covered(found, vocab.mapping(found, size, V, always)[1])
    assert reached >= share - 1e-9
    assert size == len(always) or vocab.covered(found, vocab.mapping(found, size - 1, V, always)[1]) < share


def test_a_coverage_curve_by_another_ranking_counts_what_that_one_chose():
    assert vocab.coverage({3: 1, 9: 3}, ranking=[7, 3, 9]) == [[1, 0.0], [2, 0.25], [3, 1.0]]
    assert vocab.coverage({}, ranking=[7, 3]) == [[1, 0.0], [2, 0.0]]


def test_padded_rows_of_the_head_are_taken_only_where_nothing_else_is_left():
    """A head of 320 rows for 259 tokens: unused ids fill up from the low end."""
    assert max(chosen(vocab.mapping(counts(10, top=259), 100, V)[0])) < 259
    assert chosen(vocab.mapping(counts(10, top=259), V, V)[0]) == list(range(V))


def test_what_a_vocabulary_allows_is_said_by_the_held_out_tokens_where_there_are_some():
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[[1, 2]] = True
    said = vocab.ceiling({1: 9, 3: 1}, {1: 1, 3: 1}, t2d, steps=3)
    assert "2 tokens covers 90.00% of the trained tokens, 50.00% of the held-out ones" in said and "1.88 of 4" in said
    assert "held-out" not in vocab.ceiling({1: 9, 3: 1}, {}, t2d, 3) and "3.44 of 4" in vocab.ceiling({1: 9, 3: 1}, {}, t2d, 3)


def test_counts_come_back_from_the_file_as_they_were_saved(tmp_path):
    found = counts()
    vocab.save_counts(found, tmp_path / "token_freq.pt")
    assert vocab.load_counts(tmp_path / "token_freq.pt") == found
    assert [p.name for p in tmp_path.iterdir()] == ["token_freq.pt"]


def test_the_identity_tells_two_vocabularies_apart():
    one, other = vocab.mapping(counts(), 64, V)[0], vocab.mapping(counts(seed=1), 64, V)[0]
    assert vocab.identity(one) == vocab.identity(one.clone()) != vocab.identity(other)
