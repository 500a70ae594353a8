"""Collectives between real processes: worlds, subgroups, overlapping groups, and ranks that disagree."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist

import triton_ext as tx
from collectives import assert_close, inputs, launch, make_plan, reference
from distributed import harness

COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"]


def _every_collective(rank, tell, world):
    for collective in COLLECTIVES:
        for shape in [(37, 29), (world - 1, 20), (64, 48)]:
            plan = make_plan(collective, shape, torch.float32, rank, world)
            for seed in range(3):
                tensors = inputs(world, shape, torch.float32, seed)
                result = launch(plan, tensors[rank])
                assert_close(result, reference(collective, tensors, rank).to(result.dtype))
    return True


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_worlds(world):
    before = set(os.listdir("/dev/shm"))
    assert harness.run(world, _every_collective, world) == [True] * world
    assert [name for name in set(os.listdir("/dev/shm")) - before if "triton_ext" in name] == []


def _groups_that_overlap(rank, tell):
    members = [[1, 3], [0, 1, 2], [3, 0]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [(ranks, group) for ranks, group in zip(members, groups, strict=True) if rank in ranks]
    plans = [tx.all_reduce((33, 17), torch.float32, group=group) for _, group in mine]
    for seed in range(10):
        tensors = inputs(4, (33, 17), torch.float32, seed)
        order = list(zip(mine, plans, strict=True))
        for (ranks, _), plan in order:
            result = launch(plan, tensors[rank])
            assert_close(result, reference("all_reduce", [tensors[r] for r in ranks], 0).float())
    return True


def test_groups_that_overlap():
    assert harness.run(4, _groups_that_overlap) == [True] * 4


def _late_and_bitwise_the_same(rank, tell):
    tensors = inputs(3, (70, 50), torch.float32)
    plan = tx.all_reduce((70, 50), torch.float32)
    results = []
    for run in range(10):
        time.sleep(random.Random(10 * run + rank).random() * 0.02 + (0.1 if run % 3 == rank else 0))
        results.append(launch(plan, tensors[rank]).clone())
    assert all(torch.equal(results[0], result) for result in results)
    return results[0]


def test_a_late_rank_and_bitwise_equal_runs():
    first, *others = harness.run(3, _late_and_bitwise_the_same)
    assert all(torch.equal(first, other) for other in others)


def _plan_that_differs(rank, tell, what):
    shape, dtype = (8, 8), torch.float32
    if what == "shape" and rank == 1:
        shape = (8, 9)
    if what == "dtype" and rank == 1:
        dtype = torch.float16
    try:
        tx.all_reduce(shape, dtype)
    except tx.errors.PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("what", "values"), [("shape", ["(8, 8)", "(8, 9)"]), ("dtype", ["float32", "float16"])])
def test_ranks_that_disagree_raise_everywhere(what, values):
    for text in harness.run(3, _plan_that_differs, what):
        assert what in text and all(value in text for value in values), text
