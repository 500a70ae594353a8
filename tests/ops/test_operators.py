"""The operators on virtual ranks: shapes, worlds, layouts, dtypes, repetition, misuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_ext as tx
from collectives import assert_close
from ops.cases import Embedding, Gemm, Gemv
from triton_ext.errors import LaunchError, PlanError

CASES = {"gemm": Gemm, "gemv": Gemv, "embedding": Embedding}


def check(world, *cases, functional=True):
    """Every case, in order, on `world` virtual ranks."""

    def rank_main(rank):
        for case in cases:
            result = case.call(rank) if functional else case.call(rank, plan=case.plan(rank))
            assert result.dtype == case.dtype
            assert_close(result, case.expected(rank).to(result.dtype))

    tx.testing.World(world).run(rank_main)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("operator", CASES)
def test_worlds(operator, world):
    check(world, CASES[operator](world))


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 127, 128, 129])
def test_rows_around_the_block_and_the_world(rows):
    world = 4
    check(world, Gemm(world, m=rows), Embedding(world, samples=rows), Gemv(world, n=rows))


def test_one_column_and_no_depth():
    check(3, Gemm(3, n=1), Gemm(3, k=0), Gemv(3, n=1), Gemv(3, k=0), Embedding(3, dim=1), Embedding(3, longest=1))


@pytest.mark.parametrize("world", [1, 2])
def test_every_size_may_be_one(world):
    """Triton makes an integer argument that is 1 a constant, which has no methods."""
    ones = [Gemm(world, 1, 1, 1), Gemv(world, 1, 1, 1), Embedding(world, 1, 1, 1, longest=2)]
    check(world, *ones, Embedding(world, tables=1), Gemm(world, m=1, n=1), Gemm(world, k=1, n=1), Gemv(world, n=1, k=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", CASES)
def test_dtypes(operator, dtype):
    check(2, CASES[operator](2, dtype=dtype))


@pytest.mark.parametrize("batch", [2, 3, 8, 16, 17, 64])
def test_batches(batch):
    check(2, Gemv(2, batch=batch))


def test_pooling_by_the_mean():
    check(2, Embedding(2, mode="mean"))


def test_tables_that_differ_among_ranks():
    check(3, Embedding(3, tables=[2, 0, 5]))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(0, 140), st.integers(0, 70), st.integers(1, 140))
def test_any_shape(world, m, k, n):
    check(world, Gemm(world, m, k, n), Embedding(world, samples=m, dim=n), functional=False)


def test_shapes_a_b_a_with_changing_data():
    check(2, *[Gemm(2, m=m, seed=seed) for seed, m in enumerate([40, 9, 40, 9, 64, 40])])


def test_plans_keep_their_address_and_interleave():
    def rank_main(rank):
        first, second = Gemm(2), Gemv(2)
        plans = [first.plan(rank), second.plan(rank)]
        addresses = None
        for _ in range(5):
            results = [case.call(rank, plan=plan) for case, plan in zip((first, second), plans, strict=True)]
            for case, result in zip((first, second), results, strict=True):
                assert_close(result, case.expected(rank).float())
            found = [result.data_ptr() for result in results]
            addresses = addresses or found
            assert found == addresses

    tx.testing.World(2).run(rank_main)


LAYOUTS = {
    "transposed": lambda x: x.T.contiguous().T,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "rows of a wider tensor": lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    gemm, gemv = Gemm(2), Gemv(2, batch=3)
    for tensors in (gemm.a, gemm.b, gemv.x, gemv.w):
        tensors[:] = [LAYOUTS[layout](tensor) for tensor in tensors]
    check(2, gemm, gemv)


def test_expanded_inputs():
    gemm = Gemm(2)
    gemm.a[:] = [a[:1].expand(33, 29) for a in gemm.a]
    check(2, gemm)


def test_nan_and_inf_pass_through():
    gemm = Gemm(2)
    gemm.a[0][3, 4], gemm.a[1][20, 1] = float("inf"), float("nan")
    check(2, gemm)


def test_bitwise_equal_runs():
    def rank_main(rank):
        case = Gemv(4, batch=3)
        results = [case.call(rank) for _ in range(10)]
        assert all(torch.equal(results[0], result) for result in results)
        return results[0]

    first, *others = tx.testing.World(4).run(rank_main)
    assert all(torch.equal(first, other) for other in others), "the same on all ranks"


REFUSED = {
    "shapes": (lambda: tx.ops.gemm_all_to_all(torch.ones(2, 3), torch.ones(4, 5)), r"\(2, 3\) and \(4, 5\)"),
    "dtypes": (lambda: tx.ops.gemm_all_to_all(torch.ones(2, 3), torch.ones(3, 5).half()), "float32 and torch.float16"),
    "batch": (lambda: tx.ops.gemv_all_reduce(torch.ones(65, 3), torch.ones(4, 3)), "at most 64 rows, got 65"),
    "mode": (lambda: tx.ops.embedding_all_to_all(*Embedding(1).arguments(0), mode="max"), "'max' is neither"),
    "indices": (
        lambda: tx.ops.embedding_all_to_all(
            *[x.int() if i == 2 else x for i, x in enumerate(Embedding(1).arguments(0))]
        ),
        "indices must be contiguous int64",
    ),
    "tables": (
        lambda: tx.ops.embedding_all_to_all(*Embedding(1).arguments(0), total_tables=5),
        "have 3 tables together, not 5",
    ),
    "plan": (lambda: Gemm(1).call(0, plan=tx.all_to_all((4, 4), torch.float32)), r"\(4, 4\), this is \(33, 21\)"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_refuses(mistake):
    call, message = REFUSED[mistake]
    with pytest.raises(LaunchError, match=message):
        tx.testing.World(1).run(lambda rank: call())


def test_without_a_group():
    with pytest.raises(PlanError, match=r"call tx\.init\(\) first"):
        Gemm(1).call(0)
