"""Metis's division of devices among stages: the published numbers of vectors, and any number of devices."""

from collections import Counter
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.planner.parallel.metis.groups import compositions, count_ordered, fused, group_vectors, orders, sizes

# Arrangements by number of stages, 1 to 10: variance 1, at most 6 blocks.
PUBLISHED = {
    8: [1, 1, 3, 1, 15, 15, 4, 1],
    16: [1, 1, 0, 1, 0, 15, 4, 1, 125, 105],
    32: [1, 1, 0, 1, 0, 0, 4, 1, 0, 0],
    64: [1, 1, 0, 1, 0, 0, 0, 1, 0, 0],
}


@pytest.mark.parametrize("devices", PUBLISHED)
def test_published_numbers(devices):
    found = [group_vectors(devices, stages, 1.0, 6) for stages in range(1, min(devices, 10) + 1)]
    assert [each.arrangements for each in found] == PUBLISHED[devices]
    for each in found:
        assert len(each.vectors) == len(set(each.vectors)) <= each.arrangements


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 10), st.sampled_from([0.0, 0.5, 1.0, 1.7]), st.integers(1, 8))
def test_vectors_sum_to_the_devices_and_the_counts_add_up(devices, stages, variance, limit):
    found = group_vectors(devices, stages, variance, limit)
    for vector in found.vectors:
        assert sum(vector) == devices and len(vector) == stages
        assert all(size in sizes(devices, stages) for size in vector)
        assert min(vector) >= variance * (devices // stages)
    total = count_ordered(devices, stages, sizes(devices, stages))
    assert len(found.vectors) + found.pruned_by_size + found.pruned_by_order == total
    assert found.pruned_by_order >= 0 and found.pruned_by_size >= 0


@settings(deadline=None)
@given(st.integers(1, 14), st.integers(1, 4))
def test_nothing_pruned_is_everything(devices, stages):
    found = group_vectors(devices, stages, 0.0, stages)
    allowed = sizes(devices, stages)
    expected = {vector for vector in product(allowed, repeat=stages) if sum(vector) == devices}
    assert set(found.vectors) == expected
    assert found.pruned_by_size == found.pruned_by_order == 0


@pytest.mark.parametrize("devices", [1, 3, 6, 7, 12, 20, 24, 96])
def test_any_number_of_devices_has_plans(devices):
    for stages in (1, 2, 3):
        if stages <= devices:
            found = group_vectors(devices, stages, 0.5, 6)
            assert found.vectors or devices == 7, stages
    assert group_vectors(devices, 1, 1.0, 6).vectors == ((devices,),)


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
        strict = set(group_vectors(24, stages, 1.0, 24).vectors)
        assert strict <= set(group_vectors(24, stages, 0.5, 24).vectors)
