"""Kernels that are right pass; what an author can do wrong is reported, with the seed that repeats it."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import triton_ext as tx
import triton_ext.language as txl
from collectives import copy_out, inputs, make_plan, reference, simulation
from triton_ext.cli import app
from triton_ext.errors import SimulationError
from triton_ext.simulator import result_of, simulate

COLLECTIVES = ["all_to_all", "all_gather", "broadcast", "put", "reduce_scatter", "all_reduce", "all_reduce_one_shot"]


def passes(simulated, seeds, **options):
    for seed in seeds:
        finding, steps = simulated.run(seed, **options)
        assert finding is None, finding
        assert steps > 0


class TestRightKernels:
    @pytest.mark.parametrize("collective", COLLECTIVES)
    @pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
    def test_a_copy_of_ragged_shape(self, collective, world):
        simulated = simulation(collective, world, (13, 20), (8, 16))
        for resident in (None, 1):
            passes(simulated, range(2), resident=resident)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
    def test_types(self, dtype):
        passes(simulation("all_reduce", 2, (9, 16), (8, 16), dtype), range(4))

    def test_many_runs_reuse_the_same_memory(self):
        passes(simulation("all_reduce", 2, (9, 16), (8, 16)), range(6), runs=5)

    @settings(max_examples=6, deadline=None)
    @given(
        collective=st.sampled_from(COLLECTIVES),
        world=st.integers(1, 4),
        shape=st.tuples(st.integers(1, 24), st.integers(1, 24)),
        seed=st.integers(0, 10**6),
    )
    def test_any_shape_and_seed(self, collective, world, shape, seed):
        passes(simulation(collective, world, shape, (8, 16)), [seed])

    @pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize(
        "module, name",
        [("gemm", "gemm_all_to_all"), ("gemv", "gemv_all_reduce"), ("embedding", "embedding_all_to_all")],
    )
    def test_the_kernels_of_the_operators(self, module, name, world):
        room = importlib.import_module(f"triton_ext.ops.{module}")
        arguments = room.SIMULATIONS[f"{name}_kernel"]
        report = simulate(getattr(room, f"{name}_kernel"), world, lambda rank: arguments(rank, world), seeds=4)
        assert report.seeds == 4 and not report.findings


@triton.jit
def reads_result(c, r, x, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Reads what the others send before anything says that it is there."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows[:, None] * N + columns[None, :]
    value = tl.load(x + at, mask=inside, other=0)
    out.store([row * BM, column * BN], value)
    tl.store(x + at, tl.load(r + at, mask=inside, other=0), mask=inside)


@triton.jit
def stores_twice(c, M, N, BM: tl.constexpr, BN: tl.constexpr):
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    zeros = tl.zeros((BM, BN), tl.float32)
    out.store([row * BM, column * BN], zeros)
    out.store([row * BM, column * BN], zeros + 1)


@triton.jit
def skips_a_tile(c, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Its mask leaves out the last column of the tensor."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    keep = (rows < M)[:, None] & (columns < N - 1)[None, :]
    out.store([row * BM, column * BN], tl.zeros((BM, BN), tl.float32), mask=keep)


@triton.jit
def reads_too_far(c, x, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """No mask on its load."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    out.store([row * BM, column * BN], tl.load(x + rows[:, None] * N + columns[None, :]))


@triton.jit
def waits_for_its_neighbour(c, flags, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Every program waits for the one behind it to begin: it needs them all to be resident at once."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    me = tl.program_id(0)
    tl.atomic_add(flags + me, 1, sem="release")
    if me + 1 < tl.num_programs(0):
        while tl.atomic_add(flags + me + 1, 0, sem="acquire") == 0:
            pass
    out.store([row * BM, column * BN], tl.zeros((BM, BN), tl.float32))


@triton.jit
def shares_a_scratch(c, scratch, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """All programs use one tensor, and nothing orders them."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    lanes = tl.arange(0, BN)
    tl.store(scratch + lanes, tl.full((BN,), 1.0, tl.float32) * row)
    value = tl.load(scratch + lanes)
    out.store([row * BM, column * BN], tl.broadcast_to(value[None, :], (BM, BN)))


SHAPE, BLOCK = (20, 32), {"BM": 8, "BN": 16}


def arguments(collective="all_to_all", **tensors):
    """Of the kernels above: a plan, sizes, blocks and tensors that are made anew on each rank."""

    def args(rank):
        plan = make_plan(collective, SHAPE, torch.float32, rank, 2)
        made = {name: make(plan) for name, make in tensors.items()}
        return {"c": plan, **made, "M": SHAPE[0], "N": SHAPE[1], **BLOCK, "grid": plan.grid(*BLOCK.values())}

    return args


def ones(_):
    return torch.ones(SHAPE)


MISTAKES = {  # kernel, arguments, options, what it may be reported as, and where
    "reads the result": (
        reads_result, arguments("all_reduce", r=result_of, x=ones), {}, {"stale read", "race"}, "reads_result",
    ),
    "stores twice": (stores_twice, arguments(), {}, {"double write", "race"}, "stores_twice"),
    "leaves elements out": (skips_a_tile, arguments(), {}, {"unwritten"}, ""),
    "no mask": (reads_too_far, arguments(x=ones), {}, {"out of bounds"}, "reads_too_far"),
    "needs residents": (
        waits_for_its_neighbour, arguments(flags=lambda _: torch.zeros(6, dtype=torch.int32)), {"resident": 1},
        {"deadlock"}, "",
    ),
    "shares a scratch": (
        shares_a_scratch, arguments(scratch=lambda _: torch.zeros(16)), {}, {"race"}, "shares_a_scratch",
    ),
}  # fmt: skip


class TestMistakes:
    @pytest.mark.parametrize("mistake", MISTAKES)
    def test_is_reported_and_repeats_from_its_seed(self, mistake):
        kernel, args, options, kinds, function = MISTAKES[mistake]
        with pytest.raises(SimulationError) as caught:
            simulate(kernel, 2, args, seeds=30, **options)
        text = str(caught.value)
        kind, seed = text.split("\n")[1].split(" (seed ")
        seed = int(seed.split(")")[0])
        assert kind in kinds and function in text
        with pytest.raises(SimulationError) as again:
            simulate(kernel, 2, args, seeds=[seed], **options)
        assert text.split("\n")[1:] == str(again.value).split("\n")[1:]

    def test_a_deadlock_prints_who_waits_for_what(self):
        kernel, args, options, *_ = MISTAKES["needs residents"]
        with pytest.raises(SimulationError) as caught:
            simulate(kernel, 2, args, seeds=4, **options)
        text = str(caught.value)
        assert "waits for element" in text and "of the argument flags" in text
        assert "wait for one of 1 slots" in text

    def test_that_kernel_passes_if_all_its_programs_are_resident(self):
        kernel, args, *_ = MISTAKES["needs residents"]
        assert simulate(kernel, 2, args, seeds=5, runs=1, resident=99).seeds == 5

    def test_elements_may_be_left_out_on_purpose(self):
        assert simulate(skips_a_tile, 2, arguments(), seeds=5, partial=True).seeds == 5

    def test_a_wrong_result_is_reported(self):
        tensors = inputs(2, (8, 16), torch.float32)

        def args(rank):
            plan = tx.all_gather((8, 16), torch.float32)
            return {"x": tensors[rank], "c": plan, "M": 8, "N": 16, "stride": 16, "BM": 8, "BN": 16,
                    "grid": plan.grid(8, 16)}  # fmt: skip

        with pytest.raises(SimulationError, match=r"wrong result.*element"):
            simulate(copy_out, 2, args, seeds=2, expected=lambda rank: 1 + reference("all_gather", tensors, rank))

    def test_arguments_without_a_grid(self):
        with pytest.raises(SimulationError, match="no grid"):
            simulate(stores_twice, 2, lambda rank: {"c": tx.all_gather(SHAPE, torch.float32), "M": 1, "N": 1, **BLOCK})


class TestCommand:
    def run(self, *arguments):
        result = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
        return result.exit_code, result.output

    def test_an_operator(self):
        code, output = self.run(f"{tx.ops.__path__[0]}/gemm.py:gemm_all_to_all_kernel", "--world", 3, "--seeds", 5)
        assert code == 0, output
        assert "world 3: 5 seeds, 2 runs each" in output and "nothing found" in output

    def test_a_mistake_ends_with_its_seed(self):
        code, output = self.run(f"{__file__}:stores_twice", "--world", 2, "--seeds", 9)
        assert code == 1 and "stores_twice (test_simulate.py:" in output and "seed" in output

    def test_a_kernel_without_arguments(self):
        code, output = self.run(f"{__file__}:reads_too_far")
        assert code == 1 and "SIMULATIONS" in output


SIMULATIONS = {"stores_twice": lambda rank, world: arguments()(rank)}
