"""Many runs of many plans with ranks that wander apart: slow."""

import random
import time

import pytest
import torch

from collectives import assert_close, inputs, launch, make_plan, reference
from distributed import harness

COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"]


def _wander(rank, tell, world):
    shape = (3 * world + 1, 40)
    plans = {name: make_plan(name, shape, torch.float32, rank, world) for name in COLLECTIVES}
    order = random.Random(0)  # the same on all ranks
    delay = random.Random(rank)
    for seed in range(300):
        name = order.choice(COLLECTIVES)
        tensors = inputs(world, shape, torch.float32, seed)
        if delay.random() < 0.1:
            time.sleep(delay.random() * 0.01)
        result = launch(plans[name], tensors[rank], block=order.choice([(4, 16), (16, 16), (64, 64)]))
        assert_close(result, reference(name, tensors, rank).to(result.dtype))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_ranks_that_wander_apart(world):
    assert harness.run(world, _wander, world) == [True] * world
