"""Random operators, shapes, worlds and delays on real processes, for a chosen time: `make stress`.

TRITON_EXT_STRESS_S: how long (5); TRITON_EXT_STRESS_SEED: what repeats a sequence of cases.
"""

import gc
import os
import random
import time
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives import assert_close, inputs, launch, make_plan, reference
from distributed import harness
from ops.cases import Embedding, Gemm, Gemv

COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"]
BLOCKS = [(4, 16), (16, 16), (64, 64)]
SECONDS = float(os.environ.get("TRITON_EXT_STRESS_S", 5))
SEED = int(os.environ.get("TRITON_EXT_STRESS_SEED", time.time_ns() % 10**9))
WORLDS = [2, 3, 5] if SECONDS >= 30 else [3]
_REPETITIONS = 30  # of the last case, whose kernel is compiled: what a process holds must not grow any more
_GROWTH_MIB = 8


class Copy:
    """copy_out through any collective, with ranks that choose different blocks where the collective allows it."""

    def __init__(self, world, choose):
        self.world, self.name = world, choose.choice(COLLECTIVES)
        self.shape, self.block = (choose.randrange(1, 40), choose.randrange(1, 70)), choose.choice(BLOCKS)
        self.tensors = inputs(world, self.shape, torch.float32, choose.randrange(1000))

    def plan(self, rank):
        return make_plan(self.name, self.shape, torch.float32, rank, self.world)

    def call(self, rank, plan):
        return launch(plan, self.tensors[rank], self.block)

    def expected(self, rank):
        return reference(self.name, self.tensors, rank)


def random_case(world, choose):
    """A case, and what it is in words."""
    kind = choose.choice(["copy", "copy", "gemm", "gemv", "embedding"])
    seed = choose.randrange(1000)
    if kind == "copy":
        case = Copy(world, choose)
        return case, f"{case.name} of {case.shape} in blocks of {case.block}"
    if kind == "gemm":
        sizes = [choose.randrange(1, 50) for _ in range(3)]
        return Gemm(world, *sizes, seed=seed), f"Gemm(m, k, n = {sizes}, seed={seed})"
    if kind == "gemv":
        sizes = choose.choice([1, 2, 5]), choose.randrange(1, 60), choose.randrange(1, 90)
        return Gemv(world, *sizes, seed=seed), f"Gemv(batch, k, n = {sizes}, seed={seed})"
    sizes = choose.randrange(1, 30), [choose.randrange(1, 4) for _ in range(world)], choose.choice([4, 20, 33])
    return Embedding(world, *sizes, seed=seed), f"Embedding(samples, tables, dim = {sizes}, seed={seed})"


def _holds():
    """What this process holds: descriptors, mappings of shared memory, and MiB of memory."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return len(os.listdir("/proc/self/fd")), mappings, resident


def _shared_memory():
    """Names in the whole machine's shared memory, but for the locks of Python's pools, which other tests may have."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _run(case, rank, choose, delay, about):
    """A plan's life: made, run a few times with delays, checked, freed. Returns the number of runs."""
    runs, step = choose.randrange(1, 6), "making the plan"
    try:
        plan = case.plan(rank)
        for run in range(runs):
            step = f"run {run} of {runs}"
            if delay.random() < 0.2:
                time.sleep(delay.random() * 0.01)
            result = case.call(rank, plan=plan)
            assert_close(result, case.expected(rank).to(result.dtype))
        plan.free()
    except BaseException as error:
        error.add_note(f"{about}, {step}")
        raise
    return runs


def _stress(rank, tell, world, seconds, seed):
    choose, delay = random.Random(seed), random.Random(f"{seed} {rank}")  # the first is the same on all ranks
    end = time.monotonic() + seconds
    cases = runs = 0
    while True:
        go_on = torch.tensor([time.monotonic() < end or cases < 2])
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        case, text = random_case(world, choose)
        about = f"rank {rank} of {world}, TRITON_EXT_STRESS_SEED={seed}, case {cases}: {text}"
        runs += _run(case, rank, choose, delay, about)
        cases += 1
    before = _holds()
    for n in range(_REPETITIONS):
        _run(case, rank, choose, delay, f"{about}, repetition {n}")
    return cases, runs, before, _holds()


@pytest.mark.timeout(240 + 2 * SECONDS)
@pytest.mark.parametrize("world", WORLDS)
def test_random_operators_shapes_and_delays(world, capsys):
    resource_tracker.ensure_running()  # Python's own, which starts with the first process and stays
    shared, descriptors = _shared_memory(), len(os.listdir("/proc/self/fd"))
    results = harness.run(world, _stress, world, SECONDS / len(WORLDS), SEED)
    for cases, runs, before, after in results:
        assert (cases, runs) == results[0][:2], f"seed {SEED}"
        assert after[:2] <= before[:2], f"seed {SEED}: descriptors and mappings grew from {before[:2]} to {after[:2]}"
        assert after[2] - before[2] < _GROWTH_MIB, f"seed {SEED}: memory grew from {before[2]} to {after[2]} MiB"
    assert _shared_memory() <= shared
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with capsys.disabled():
        cases, runs, *_ = results[0]
        print(f"\nstress: world {world}, seed {SEED}: {cases} cases, {runs} runs")


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
        result = launch(plans[name], tensors[rank], block=order.choice(BLOCKS))
        assert_close(result, reference(name, tensors, rank).to(result.dtype))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_ranks_that_wander_apart(world):
    assert harness.run(world, _wander, world) == [True] * world
