"""Layouts replayed on numpy: every element reaches its place, exactly once, and as many arrive as are expected."""

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.runtime import layout

worlds = st.integers(1, 5)
sizes = st.integers(0, 7)


def replay(plan: layout.Layout, tensors: list[np.ndarray], split_dim: int | None) -> list[np.ndarray]:
    """What kernels do with a layout that does not reduce."""
    results = [np.full(max(1, prod(shape)), -1.0) for shape in plan.result_shapes]
    arrived = np.zeros((plan.world, plan.world), dtype=int)
    for source, tensor in enumerate(tensors):
        for index in itertools.product(*map(range, tensor.shape)):
            owners = range(*plan.destinations[source])
            if split_dim is not None:
                owners = [index[split_dim] // plan.shard]
            for owner in owners:
                route = plan.routes[source][owner]
                at = route.origin + sum(i * s for i, s in zip(index, route.strides, strict=True))
                assert results[owner][at] == -1, "stored twice"
                results[owner][at] = tensor[index]
                arrived[source, owner] += 1
    assert arrived.tolist() == [[route.expected for route in routes] for routes in plan.routes]
    shaped = zip(results, plan.result_shapes, strict=True)
    return [result[: prod(shape)].reshape(shape) for result, shape in shaped]


def numbered(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    start = itertools.count(0, 10_000)
    return [next(start) + np.arange(prod(shape), dtype=float).reshape(shape) for shape in shapes]


def chunks(tensor: np.ndarray, world: int, dim: int) -> list[np.ndarray]:
    cuts = [layout.owned(tensor.shape[dim], world, rank) for rank in range(world)]
    return [tensor.take(range(start, end), dim) for start, end in cuts]


@st.composite
def shapes_with_free_dim(draw):
    ndim = draw(st.integers(1, 3))
    free = draw(st.integers(0, ndim - 1))
    shape = [draw(sizes) for _ in range(ndim)]
    world = draw(worlds)
    return [tuple(draw(sizes) if dim == free else shape[dim] for dim in range(ndim)) for _ in range(world)], free


@given(shapes_with_free_dim(), st.integers(0, 2))
def test_all_to_all(case, split_dim):
    shapes, concat_dim = case
    split_dim %= len(shapes[0])
    if split_dim == concat_dim:
        shapes = [shapes[0]] * len(shapes)
    tensors = numbered(shapes)
    plan = layout.all_to_all(shapes, split_dim, concat_dim)
    results = replay(plan, tensors, split_dim)
    for rank, result in enumerate(results):
        parts = [chunks(tensor, len(shapes), split_dim)[rank] for tensor in tensors]
        np.testing.assert_array_equal(result, np.concatenate(parts, concat_dim))


@given(shapes_with_free_dim())
def test_all_gather(case):
    shapes, concat_dim = case
    tensors = numbered(shapes)
    for result in replay(layout.all_gather(shapes, concat_dim), tensors, None):
        np.testing.assert_array_equal(result, np.concatenate(tensors, concat_dim))


@given(worlds, st.tuples(sizes, sizes), st.data())
def test_broadcast(world, shape, data):
    root = data.draw(st.integers(0, world - 1))
    tensors = numbered([shape] * world)
    for result in replay(layout.broadcast([shape] * world, root), tensors, None):
        np.testing.assert_array_equal(result, tensors[root])


@given(worlds, st.tuples(sizes, sizes), st.data())
def test_put(world, shape, data):
    order = data.draw(st.permutations(range(world)))
    destinations = [rank if data.draw(st.booleans()) else None for rank in order]
    tensors = numbered([shape] * world)
    results = replay(layout.put([shape] * world, destinations), tensors, None)
    for source, destination in enumerate(destinations):
        if destination is not None:
            np.testing.assert_array_equal(results[destination], tensors[source])


@given(worlds, st.lists(sizes, min_size=1, max_size=3).map(tuple), st.integers(0, 2), st.booleans())
def test_reductions(world, shape, split_dim, to_all):
    split_dim %= len(shape)
    shapes = [shape] * world
    plan = (layout.all_reduce if to_all else layout.reduce_scatter)(shapes, split_dim)
    tensors = numbered(shapes)
    stages = [np.full(plan.stage_elements, np.nan) for _ in range(world)]
    results = [np.full(max(1, prod(shape)), np.nan) for shape in plan.result_shapes]
    arrived, reduced = np.zeros((2, world, world), dtype=int)
    everywhere = list(itertools.product(*map(range, shape)))
    for source, index in itertools.product(range(world), everywhere):
        owner = index[split_dim] // plan.shard
        if owner != source:
            route = plan.routes[source][owner]
            at = route.stage_origin + sum(i * s for i, s in zip(index, route.stage_strides, strict=True))
            assert np.isnan(stages[owner][at]), "stored twice"
            stages[owner][at] = tensors[source][index]
            arrived[source, owner] += 1
    for index in everywhere:
        owner = index[split_dim] // plan.shard
        total = 0.0
        for source in range(world):
            route = plan.routes[source][owner]
            at = route.stage_origin + sum(i * s for i, s in zip(index, route.stage_strides, strict=True))
            total += tensors[owner][index] if source == owner else stages[owner][at]
        for target in range(world) if to_all else [owner]:
            route = plan.routes[owner][target]
            results[target][route.origin + sum(i * s for i, s in zip(index, route.strides, strict=True))] = total
            reduced[owner, target] += to_all
    assert arrived.tolist() == [[route.expected for route in routes] for routes in plan.routes]
    assert reduced.tolist() == [[route.expected_reduced for route in routes] for routes in plan.routes]
    whole = sum(tensors)
    for rank, result in enumerate(results):
        expected = whole if to_all else chunks(whole, world, split_dim)[rank]
        np.testing.assert_array_equal(result[: expected.size].reshape(expected.shape), expected)


@pytest.mark.parametrize("shape, expected", [((64, 128), 4), ((64, 126), 1), ((3, 8), 4)])
def test_alignment_holds_for_every_buffer(shape, expected):
    plan = layout.all_to_all([shape] * 3, 0, 0)
    assert plan.alignment(4, 0) == expected


def test_offsets_beyond_32_bits():
    plan = layout.all_to_all([(2**20, 2**14)] * 4, 0, 0)
    assert plan.routes[3][0].origin == 3 * 2**18 * 2**14 > 2**31
