"""Metis's layer balance: many plans at once give what one at a time gives, step by step as described."""

import itertools
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.planner.parallel.metis.balance import PARTS, balance, split
from triton_ext.planner.parallel.metis.stage import balanced_shares


def one_at_a_time(costs, capacity):
    """The same split with loops over sub-layers."""
    layers, stages = len(costs), len(capacity)
    parts = [cost / sum(costs) / PARTS for cost in costs for _ in range(PARTS)]
    owner = [None] * len(parts)
    room = list(capacity)
    at, last = 0, PARTS * (layers - 1)
    for stage in range(stages - 1):
        while at < last and room[stage] > parts[at] + 1e-12:
            room[stage] -= parts[at]
            owner[at] = stage
            at += 1
        if at < last:
            at += 1  # set aside
    end = len(parts) - 1
    while end >= at and (end >= last or room[-1] > parts[end] + 1e-12):
        room[-1] -= parts[end]
        owner[end] = stages - 1
        end -= 1
    for index in range(len(parts)):
        if owner[index] is None:
            left = max((o for o in owner[:index] if o is not None), default=0)
            right = min(o for o in owner[index:] if o is not None)
            if right > left + 1:  # set aside before a stage that got nothing: it is that stage's neighbour too
                right = left + 1
            owner[index] = left if room[left] >= room[right] - 1e-12 else right
            room[owner[index]] -= parts[index]
    return [sum(owner[PARTS * layer + PARTS // 2] < stage for layer in range(layers)) for stage in range(stages + 1)]


def prefix(costs):
    return np.concatenate(([0.0], np.cumsum(np.repeat(np.array(costs) / sum(costs) / PARTS, PARTS))))


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(8, 20), st.integers(0, 2**32 - 1))
def test_the_split_before_moves(stages, layers, seed):
    random = np.random.default_rng(seed)  # of numbers without ties
    costs, capacity = random.uniform(0.5, 3, layers), random.uniform(1, 4, (stages, 5))
    capacity = capacity / capacity.sum(axis=0)
    with mock.patch.object(sys.modules[split.__module__], "_MOVES", 0):
        found = split(prefix(costs), capacity)
    for plan in range(capacity.shape[1]):
        expected = one_at_a_time(costs.tolist(), capacity[:, plan])
        if all(begin < end for begin, end in itertools.pairwise(expected)):  # else a layer is given to the empty stage
            assert found[:, plan].tolist() == expected


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_every_stage_has_layers_and_none_is_lost(stages, data):
    costs = data.draw(st.lists(st.floats(0.0, 100.0), min_size=stages, max_size=stages + 12).filter(sum))
    capacity = np.array(
        data.draw(st.lists(st.lists(st.floats(0.01, 10.0), min_size=stages, max_size=stages), min_size=1, max_size=4))
    ).T
    capacity = capacity / capacity.sum(axis=0)
    edges = split(prefix(costs), capacity)
    assert (edges[0] == 0).all() and (edges[-1] == len(costs)).all()
    assert (np.diff(edges, axis=0) >= 1).all()


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(7, 2, {3, 4}), (30, 4, {7, 8}), (40, 16, {2, 3}), (10, 4, {2, 3}), (60, 8, {7, 8}), (5, 5, {1})],
)
def test_layers_that_the_stages_do_not_divide(layers, stages, sizes):
    edges = split(prefix([1.0] * layers), np.full((stages, 1), 1 / stages))
    found = np.diff(edges[:, 0]).tolist()
    assert sum(found) == layers and set(found) <= sizes


def test_a_faster_stage_gets_more_layers():
    edges = split(prefix([1.0] * 12), np.array([[0.75, 0.25], [0.25, 0.75]]))
    assert edges[1].tolist() == [9, 3]


def test_memory_moves_layers():
    """Two equal stages of 4 layers; the first has memory for 3 only. In proportion to compute, 0.9 * 3 / 4 of the
    capacity of a half stays: 2.7 layers."""
    memory = np.array([3.0, 8.0])[:, None]

    def ratio(edges, which):
        return np.diff(edges, axis=0) / memory

    done = balance(np.ones(8), np.full((2, 1), 0.5), ratio)
    assert done.attempts.tolist() == [2] and done.edges[:, 0].tolist() == [0, 3, 8]


def test_memory_that_does_not_suffice():
    def ratio(edges, which):
        return np.diff(edges, axis=0) / np.array([[3.0, 8.0], [3.0, 8.0]])

    done = balance(np.ones(8), np.full((2, 2), 0.5), ratio)
    assert done.attempts.tolist() == [0, 1]  # the other plan of the batch is not affected
    assert done.ratio[:, 0] == pytest.approx(4 / 3)


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_plans_do_not_affect_each_other(stages, seed):
    random = np.random.default_rng(seed)
    costs = random.uniform(0.5, 2, 12)
    capacity = random.uniform(0.2, 1, (stages, 30))
    capacity /= capacity.sum(axis=0)
    limit = random.uniform(2, 8, (stages, 30))

    def ratio_of(columns):
        return lambda edges, which: np.diff(edges, axis=0) / limit[:, columns][:, which]

    together = balance(costs, capacity, ratio_of(np.arange(30)))
    for plan in range(30):
        alone = balance(costs, capacity[:, [plan]], ratio_of(np.array([plan])))
        assert alone.attempts[0] == together.attempts[plan]
        assert (alone.edges[:, 0] == together.edges[:, plan]).all()
        if alone.attempts[0]:
            assert (np.diff(together.edges[:, plan]) <= limit[:, plan] + 1e-9).all()


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9), st.integers(0, 60))
def test_shares(speeds, more):
    samples = len(speeds) + more
    shares = balanced_shares(speeds, samples)
    assert sum(shares) == samples and min(shares) >= 1
    for share, speed in zip(shares, speeds, strict=True):
        assert share == 1 or share <= samples * speed / sum(speeds) + 1


def test_shares_in_proportion():
    assert balanced_shares((3.0, 1.0), 8) == (6, 2)
    assert balanced_shares((2.0, 1.0), 4) == (3, 1)  # 2.67 and 1.33: the rest to the larger fraction
    assert balanced_shares((1.0, 1.0, 1.0), 4) == (2, 1, 1)
    assert balanced_shares((1000.0, 1.0), 4) == (3, 1)  # no replica goes without
