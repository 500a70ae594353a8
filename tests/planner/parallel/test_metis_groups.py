"""Metis's division of devices among stages: the published numbers of vectors, and any number of devices."""

from collections import Counter
from itertools import islice, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.planner.parallel.metis.groups import all_sizes, compositions, count_ordered, fused, groups, orders

# Arrangements by number of stages, 1 to 10: variance 1, at most 6 blocks.
PUBLISHED = {
    8: [1, 1, 3, 1, 15, 15, 4, 1],
    16: [1, 1, 0, 1, 0, 15, 4, 1, 125, 105],
    32: [1, 1, 0, 1, 0, 0, 4, 1, 0, 0],
    64: [1, 1, 0, 1, 0, 0, 0, 1, 0, 0],
}


@pytest.mark.parametrize("devices", PUBLISHED)
def test_published_numbers(devices):
    found = [groups(devices, stages, 1.0, 6) for stages in range(1, min(devices, 10) + 1)]
    assert [len(list(each.arrangements())) for each in found] == PUBLISHED[devices]
    for each in found:
        assert Counter(each.vectors()) == Counter(set(each.arrangements()))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([0.0, 0.5, 1.0, 1.7]), st.integers(1, 8))
def test_vectors_sum_to_the_devices_and_the_counts_add_up(devices, stages, variance, limit):
    found = groups(devices, stages, variance, limit)
    vectors = list(found.vectors())
    for vector in vectors:
        assert sum(vector) == devices and len(vector) == stages
        assert all(size in all_sizes(devices, stages) for size in vector)
        assert min(vector) >= variance * (devices // stages)
    assert len(set(vectors)) == len(vectors) <= found.ordered
    total = count_ordered(devices, stages, all_sizes(devices, stages))
    assert found.pruned_by_size == total - found.ordered >= 0


@settings(deadline=None)
@given(st.integers(1, 14), st.integers(1, 4))
def test_nothing_pruned_is_everything(devices, stages):
    found = groups(devices, stages, 0.0, stages)
    expected = {vector for vector in product(all_sizes(devices, stages), repeat=stages) if sum(vector) == devices}
    assert set(found.vectors()) == expected
    assert len(expected) == found.ordered and found.pruned_by_size == 0


@pytest.mark.parametrize("devices", [1, 3, 6, 7, 12, 20, 24, 96])
def test_any_number_of_devices_has_plans(devices):
    for stages in (1, 2, 3):
        if stages <= devices:
            assert list(groups(devices, stages, 0.5, 6).vectors()) or devices == 7, stages
    assert list(groups(devices, 1, 1.0, 6).vectors()) == [(devices,)]


def test_the_published_example_of_fusing():
    assert fused((1,) * 6 + (2,), 6) == [(1, 1), (1, 1), (1, 1), (2,)]
    assert fused((1, 2, 4), 2) == [(1,), (2,), (4,)]  # no equal neighbours: no progress
    assert fused((1,) * 8, 6) == [(1, 1)] * 4


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_every_distinct_order_once(parts):
    blocks = [(part,) for part in parts]
    found = list(orders(blocks))
    assert Counter(found) == Counter(set(permutations(blocks)))


def test_compositions():
    assert list(compositions(8, 5, (1, 2, 4, 8))) == [(1, 1, 1, 1, 4), (1, 1, 2, 2, 2)]
    assert list(compositions(3, 1, (1, 2))) == [] and list(compositions(3, 2, ())) == []


def test_lower_variance_only_adds():
    for stages in range(1, 9):
        strict = set(groups(24, stages, 1.0, 24).vectors())
        assert strict <= set(groups(24, stages, 0.5, 24).vectors())


def test_millions_of_vectors_are_not_made_before_they_are_asked_for():
    found = groups(64, 24, 0.5, 10)
    assert len(set(islice(found.vectors(), 1000))) == 1000
    assert found.ordered > 10**12
