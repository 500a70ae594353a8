"""Every collective on virtual ranks, over the shapes, dtypes, worlds and orders that acceptance asks for."""

import random
import time

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
import triton_ext as tx
import triton_ext.language as txl
from collectives import assert_close, chunk, copy_out, inputs, launch, make_plan, reference, virtual_world


def _as_slow(name):
    return pytest.param(name, marks=pytest.mark.slow) if name == "a host each" else name


@pytest.fixture(autouse=True, scope="module", params=map(_as_slow, collectives.PLACEMENTS))
def placement(request):
    """Every test holds wherever the ranks are."""
    collectives.placement = request.param
    yield
    collectives.placement = "one host"


COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put", "all_reduce_one_shot"]


@triton.jit
def copy_some(x, c, M, N, BM: tl.constexpr, BN: tl.constexpr, SHIFT: tl.constexpr = 0):
    """Stores all columns but the fifth."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    value = tl.load(x + rows[:, None] * N + columns[None, :], mask=inside, other=0)
    out.store([row * BM + SHIFT, column * BN], value, mask=(columns != 5)[None, :])


def run(collective, world, shape, dtype=torch.float32, block=(16, 16), runs=1, **options):
    """`runs` runs of one plan with changing data, on `world` virtual ranks, each result checked."""

    def rank_main(rank):
        plan = make_plan(collective, shape, dtype, rank, world, **options)
        address = None
        for seed in range(runs):
            tensors = inputs(world, shape, dtype, seed)
            result = launch(plan, tensors[rank], block)
            address = address or result.data_ptr()
            assert result.data_ptr() == address
            dims = {key: value for key, value in options.items() if key.endswith("_dim")}
            assert_close(result, reference(collective, tensors, rank, **dims).to(result.dtype))
        return True

    assert all(virtual_world(world).run(rank_main))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_worlds(collective, world):
    run(collective, world, (37, 29), runs=2)


@pytest.mark.parametrize("rows", ["1", "3", "127", "128", "129", "world-1", "world", "world+1", "0"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_rows(collective, rows):
    world = 4
    run(collective, world, (eval(rows, {"world": world}), 20))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_column(collective):
    run(collective, 3, (50, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_dtypes(collective, dtype):
    run(collective, 3, (21, 18), dtype)


@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize("concat_dim", [0, 1])
def test_all_to_all_dims(split_dim, concat_dim):
    run("all_to_all", 3, (20, 23), split_dim=split_dim, concat_dim=concat_dim, runs=2)


def test_reduce_scatter_along_columns():
    run("reduce_scatter", 3, (20, 23), split_dim=1, runs=2)


def test_a_tile_with_more_than_two_owners():
    for collective in ("all_to_all", "all_reduce", "reduce_scatter"):
        run(collective, 8, (9, 16), block=(64, 16), runs=2)


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_one_resident_program_reduces_tiles_of_many_owners(collective, world, monkeypatch):
    """No program may wait for values that a peer computes behind a wait of its own, however shards and tiles lie."""
    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", "1")
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "10")
    run(collective, 2, (1, 1))  # compiles
    for rows in (world * 5 + 3, 37, 64):
        for block in [(16, 16), (4, 16)]:
            run(collective, world, (rows, 40), block=block)


def test_masked_elements_add_nothing_to_a_reduction():
    def rank_main(rank):
        x = torch.ones(37, 20)
        for collective in ("all_reduce", "reduce_scatter"):
            plan = make_plan(collective, x.shape, x.dtype, rank, 3)
            copy_some[plan.grid(16, 16)](x, plan, 37, 20, BM=16, BN=16)
            total = torch.full((37, 20), 3.0)
            total[:, 5] = 0
            expected = total if collective == "all_reduce" else chunk(total, 3, rank, 0)
            assert torch.equal(plan.result, expected)

    virtual_world(3).run(rank_main)


def test_a_reduction_of_another_tile_than_the_programs_own_is_refused():
    def rank_main(rank):
        x = torch.ones(64, 16)
        plan = tx.all_reduce(x.shape, x.dtype)
        with pytest.raises(tx.errors.PlanError, match=r"stored a block that starts at \d+ .* its tile starts at \d+"):
            copy_some[plan.grid(16, 16)](x, plan, 64, 16, BM=16, BN=16, SHIFT=1)

    virtual_world(1).run(rank_main)


def test_fifty_runs_with_changing_data():
    run("all_reduce", 3, (17, 9), runs=50)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(COLLECTIVES),
    st.integers(1, 5),
    st.tuples(st.integers(0, 70), st.integers(1, 40)),
    st.sampled_from([(1, 16), (4, 8), (16, 16), (32, 16), (8, 64)]),
    st.integers(0, 1),
    st.integers(0, 1),
)
def test_any_shape(collective, world, shape, block, split_dim, concat_dim):
    dims = {"all_to_all": ["split_dim", "concat_dim"], "reduce_scatter": ["split_dim"], "all_gather": ["concat_dim"]}
    values = {"split_dim": split_dim, "concat_dim": concat_dim}
    run(collective, world, shape, block=block, runs=2, **{d: values[d] for d in dims.get(collective, [])})


def test_sizes_that_differ_along_the_concat_dim():
    world = 3

    def rank_main(rank):
        tensors = [torch.randn(10, size, generator=torch.Generator().manual_seed(size)) for size in (4, 0, 7)]
        plan = tx.all_to_all(tensors[rank].shape, torch.float32, split_dim=0, concat_dim=1)
        result = launch(plan, tensors[rank])
        assert_close(result, reference("all_to_all", tensors, rank, 0, 1))

    virtual_world(world).run(rank_main)


def test_ranks_may_use_different_blocks_and_the_block_may_shrink():
    def rank_main(rank):
        tensors = inputs(3, (40, 33), torch.float32)
        plan = tx.all_to_all((40, 33), torch.float32)
        for block in [(32, 32), (8, 16), (1 << rank, 16), (64, 64)]:
            assert_close(launch(plan, tensors[rank], block), reference("all_to_all", tensors, rank))

    virtual_world(3).run(rank_main)


def test_a_grid_larger_than_the_tensor_is_harmless():
    def rank_main(rank):
        tensors = inputs(2, (20, 20), torch.float32)
        plan = tx.all_reduce((20, 20), torch.float32)
        for grid in [(4, 3), (7,), (2, 2, 3)]:
            copy_out[grid](tensors[rank], plan, 20, 20, 20, BM=16, BN=16)
            assert_close(plan.result, reference("all_reduce", tensors, rank))

    virtual_world(2).run(rank_main)


def test_a_late_rank():
    def rank_main(rank):
        tensors = inputs(3, (30, 30), torch.float32)
        plan = tx.all_reduce((30, 30), torch.float32)
        for late in range(3):
            if rank == late:
                time.sleep(0.1)
            assert_close(launch(plan, tensors[rank]), reference("all_reduce", tensors, rank))

    virtual_world(3).run(rank_main)


def test_bitwise_equal_whatever_the_order():
    def rank_main(rank):
        tensors = inputs(4, (33, 20), torch.float32)
        plan = tx.all_reduce((33, 20), torch.float32)
        results = []
        for _ in range(10):
            time.sleep(random.random() * 0.01)
            results.append(launch(plan, tensors[rank]).clone())
        return torch.stack(results)

    results = torch.stack(virtual_world(4).run(rank_main))
    assert (results == results[0, 0]).all(), "the same on every rank, in every run"


def test_two_plans_interleaved_and_one_freed():
    def rank_main(rank):
        tensors = inputs(2, (20, 20), torch.float32)
        first = tx.all_to_all((20, 20), torch.float32)
        second = tx.all_reduce((20, 20), torch.float32)
        for _ in range(3):
            assert_close(launch(first, tensors[rank]), reference("all_to_all", tensors, rank))
            assert_close(launch(second, tensors[rank]), reference("all_reduce", tensors, rank))
        first.free()
        for _ in range(3):
            assert_close(launch(second, tensors[rank]), reference("all_reduce", tensors, rank))

    virtual_world(2).run(rank_main)


def test_wire_and_accumulation_dtypes():
    def rank_main(rank):
        tensors = inputs(4, (30, 20), torch.float32)
        plan = tx.all_reduce((30, 20), torch.float32, wire_dtype=torch.bfloat16, acc_dtype=torch.float32)
        coarse = [tensor.bfloat16() for tensor in tensors]
        assert_close(launch(plan, tensors[rank]), reference("all_reduce", coarse, rank).float())

    virtual_world(4).run(rank_main)


def test_nan_and_inf_pass_through():
    def rank_main(rank):
        tensors = inputs(2, (8, 8), torch.float32)
        tensors[0][1, 1], tensors[1][2, 2], tensors[0][3, 3] = float("nan"), float("inf"), float("-inf")
        for collective in ("all_to_all", "all_reduce"):
            plan = make_plan(collective, (8, 8), torch.float32, rank, 2)
            assert_close(launch(plan, tensors[rank]), reference(collective, tensors, rank).float())

    virtual_world(2).run(rank_main)


def test_strided_input_and_unaligned_base():
    def rank_main(rank):
        wide = torch.randn(20, 50, generator=torch.Generator().manual_seed(rank))
        views = [torch.randn(20, 50, generator=torch.Generator().manual_seed(r))[:, 3:24] for r in range(2)]
        plan = tx.all_to_all((20, 21), torch.float32)
        assert_close(launch(plan, wide[:, 3:24]), reference("all_to_all", views, rank))

    virtual_world(2).run(rank_main)


def test_subgroups_that_overlap():
    def rank_main(rank):
        tensors = inputs(4, (12, 12), torch.float32)
        for members in ([1, 3], [3, 2, 0]):
            if rank in members:
                plan = tx.all_reduce((12, 12), torch.float32, group=tx.testing.subgroup(members))
                expected = reference("all_reduce", [tensors[r] for r in members], 0)
                assert_close(launch(plan, tensors[rank]), expected)

    virtual_world(4).run(rank_main)


class TestMisuse:
    def test_result_before_a_run_and_after_free(self):
        def rank_main(rank):
            plan = tx.all_to_all((8, 8), torch.float32)
            with pytest.raises(tx.errors.PlanError, match="has not run yet"):
                _ = plan.result
            plan.free()
            with pytest.raises(tx.errors.PlanError, match="freed"):
                _ = plan.result

        virtual_world(2).run(rank_main)

    def test_a_kernel_with_a_freed_plan(self):
        def rank_main(rank):
            tensor = inputs(2, (8, 8), torch.float32)[rank]
            plan = tx.all_to_all((8, 8), torch.float32)
            launch(plan, tensor)
            plan.free()
            with pytest.raises(tx.errors.PlanError, match="freed: it did nothing"):
                copy_out[(1,)](tensor, plan, 8, 8, 8, BM=16, BN=16)

        virtual_world(2).run(rank_main)

    def test_a_grid_that_is_too_small(self):
        def rank_main(rank):
            tensor = inputs(2, (40, 8), torch.float32)[rank]
            plan = tx.all_to_all((40, 8), torch.float32)
            with pytest.raises(tx.errors.PlanError, match="the grid has 2 programs, the tensor has 3 tiles"):
                copy_out[(2,)](tensor, plan, 40, 8, 8, BM=16, BN=16)

        virtual_world(2).run(rank_main)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (lambda rank: ((8, 8 + rank), torch.float32, {}), r"shape is \(8, 8\) on rank 0 and \(8, 9\) on rank 1"),
            (
                lambda rank: ((8, 8), [torch.float32, torch.float16][rank], {}),
                "dtype is torch.float32 on rank 0 and torch.float16 on rank 1",
            ),
            (lambda rank: ((8, 8), torch.float32, {"split_dim": rank}), "split_dim is 0 on rank 0 and 1 on rank 1"),
            (lambda rank: ((8,) * (2 + rank), torch.float32, {}), "shape is"),
            (lambda rank: ((8, -1), torch.float32, {}), "none negative"),
            (lambda rank: ((2, 2, 2, 2), torch.float32, {}), "1 to 3 dimensions"),
            (lambda rank: ((8, 8), torch.complex64, {}), "cannot be sent"),
            (lambda rank: ((8, 8), torch.float32, {"split_dim": 2}), "split_dim=2 is not a dimension"),
        ],
    )
    def test_plans_that_ranks_disagree_on_or_that_are_wrong(self, arguments, message):
        def rank_main(rank):
            shape, dtype, options = arguments(rank)
            with pytest.raises(tx.errors.PlanError, match=message):
                tx.all_to_all(shape, dtype, **options)

        virtual_world(2).run(rank_main)

    def test_different_collectives(self):
        def rank_main(rank):
            with pytest.raises(
                tx.errors.PlanError, match="collective is all_reduce on rank 0 and all_gather on rank 1"
            ):
                (tx.all_reduce, tx.all_gather)[rank]((8, 8), torch.float32)

        virtual_world(2).run(rank_main)

    def test_two_ranks_that_put_to_one(self):
        def rank_main(rank):
            with pytest.raises(tx.errors.PlanError, match="ranks 0 and 1 both put to rank 1"):
                tx.put((8, 8), torch.float32, dst=1)

        virtual_world(2).run(rank_main)

    def test_no_group(self):
        with pytest.raises(tx.errors.PlanError, match=r"call tx.init\(\) first"):
            tx.all_reduce((8, 8), torch.float32)


class TestFaults:
    @pytest.mark.parametrize(
        "collective, lacks", [("all_to_all", "to begin this run"), ("all_reduce", "to deliver its values")]
    )
    def test_a_rank_that_skips_the_kernel(self, collective, lacks, monkeypatch):
        monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "0.5")

        def rank_main(rank):
            plan = make_plan(collective, (8, 8), torch.float32, rank, 2)
            if rank == 0:
                start = time.monotonic()
                # Between hosts, tiles go to an outbox, and wait there for the peer to begin.
                nonlocal lacks
                lacks = lacks if collectives.placement == "one host" else "to deliver its values"
                with pytest.raises(tx.errors.CollectiveTimeout, match=rf"waited 0\.5 s for rank 1 {lacks}"):
                    launch(plan, torch.ones(8, 8))
                assert time.monotonic() - start < 5
                with pytest.raises(tx.errors.CollectiveTimeout):
                    _ = plan.result
            else:
                time.sleep(1.0)

        virtual_world(2).run(rank_main)

    def test_a_rank_that_raises_ends_those_that_wait_for_it(self):
        def rank_main(rank):
            plan = tx.all_reduce((8, 8), torch.float32)
            if rank == 1:
                raise ZeroDivisionError
            launch(plan, torch.ones(8, 8))

        start = time.monotonic()
        with pytest.raises((ZeroDivisionError, tx.errors.PeerLost)):
            virtual_world(2).run(rank_main)
        assert time.monotonic() - start < 10

    def test_nothing_is_stored_after_a_failure(self, monkeypatch):
        """A rank that gave up must not write into what a slow peer still reads."""
        run("all_to_all", 2, (8, 8))  # compiles
        monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "0.3")

        def rank_main(rank):
            plan = tx.all_to_all((8, 8), torch.float32)
            launch(plan, torch.full((8, 8), float(rank)))
            before = plan.result.clone()
            if rank == 0:
                with pytest.raises(tx.errors.CollectiveTimeout):
                    launch(plan, torch.full((8, 8), 9.0))
            else:
                time.sleep(0.8)
                assert torch.equal(plan.result, before)

        virtual_world(2).run(rank_main)


def test_chunk_is_torchs():
    tensor = torch.arange(11)
    for world in range(1, 8):
        parts = [chunk(tensor, world, rank, 0) for rank in range(world)]
        assert [part.tolist() for part in parts if part.numel()] == [part.tolist() for part in tensor.chunk(world)]
