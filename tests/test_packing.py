"""Packing rows into batches: nothing lost, nothing doubled, nothing too big, little waste."""
import random

import pytest
import torch

from packing import packs
from stage import Refused

torch.set_num_threads(1)


def lengths(n=2000, seed=0):
    chance = random.Random(seed)
    return {row: chance.randint(50, 400) for row in range(n)}


@pytest.mark.parametrize("seed", [None, 0, "0-1"])
def test_every_row_is_in_exactly_one_pack(seed):
    rows = lengths()
    assert sorted(row for pack in packs(rows, 1024, seed) for row in pack) == sorted(rows)


def test_no_pack_is_larger_than_its_size_and_none_is_empty():
    rows = lengths()
    sums = [sum(rows[row] for row in pack) for pack in packs(rows, 1024, 0)]
    assert 0 < min(sums) and max(sums) <= 1024


def test_little_of_a_pack_stays_empty():
    rows = lengths()
    assert sum(rows.values()) / (1024 * len(packs(rows, 1024, 0))) > 0.96   # 0.98; taking the emptiest that fits: 0.93


def test_the_same_seed_gives_the_same_packs_whatever_the_order_of_the_dict():
    rows = lengths()
    turned = dict(sorted(rows.items(), reverse=True))
    assert list(turned) != list(rows)
    assert packs(rows, 1024, "3-0") == packs(turned, 1024, "3-0")


def test_another_seed_gives_other_packs():
    assert packs(lengths(), 1024, "0-0") != packs(lengths(), 1024, "0-1")


def test_rows_of_one_pack_are_not_neighbours_in_the_dataset_when_shuffled():
    first = packs(lengths(), 1024, 0)[0]
    assert max(first) - min(first) > 100


def test_a_row_that_fills_a_pack_exactly_is_packed_alone():
    assert packs({0: 1024, 1: 10}, 1024) == [[0], [1]]


def test_a_row_that_is_too_long_is_refused_by_name():
    with pytest.raises(Refused, match="row 7 has 1025 tokens.*1024"):
        packs({6: 10, 7: 1025}, 1024)


def test_no_rows_make_no_packs():
    assert packs({}, 1024) == []
