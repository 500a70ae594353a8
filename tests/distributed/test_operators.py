"""The operators between real processes: against their unfused references, under opcheck and torch.compile."""

import torch
import torch.distributed as dist
from torch.library import opcheck

from collectives import assert_close
from distributed import harness
from ops.cases import Embedding, Gemm, Gemv
from triton_ext.ops.embedding import unfused as embedding_unfused
from triton_ext.ops.gemm import unfused as gemm_unfused
from triton_ext.ops.gemv import unfused as gemv_unfused

WORLD = 2


def _against_unfused(rank, tell):
    gemm, gemv, embedding = Gemm(WORLD, m=67), Gemv(WORLD, batch=4), Embedding(WORLD)
    expected = [
        gemm_unfused(gemm.a[rank], gemm.b[rank]),
        gemv_unfused(gemv.x[rank], gemv.w[rank]),
        embedding_unfused(*embedding.arguments(rank)),
    ]
    for case, reference in zip((gemm, gemv, embedding), expected, strict=True):
        assert_close(reference, case.expected(rank).float())
        for _ in range(3):
            assert_close(case.call(rank), reference)
        assert_close(case.call(rank, plan=case.plan(rank)), reference)
    return True


def test_against_unfused():
    assert harness.run(WORLD, _against_unfused) == [True] * WORLD


def _opcheck(rank, tell):
    name = dist.group.WORLD.group_name
    gemm, gemv, embedding = Gemm(WORLD), Gemv(WORLD), Embedding(WORLD)
    ops = torch.ops.triton_ext
    opcheck(ops.gemm_all_to_all.default, (gemm.a[rank], gemm.b[rank], name))
    opcheck(ops.gemv_all_reduce.default, (gemv.x[rank], gemv.w[rank], name))
    opcheck(ops.embedding_all_to_all.default, (*embedding.arguments(rank), "sum", name, WORLD * 3))
    return True


def test_opcheck():
    assert harness.run(WORLD, _opcheck) == [True] * WORLD


def _compiled(rank, tell):
    gemm = Gemm(WORLD)
    name = dist.group.WORLD.group_name

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(a, b):
        return torch.ops.triton_ext.gemm_all_to_all(a, b, name) * 2

    assert_close(layer(gemm.a[rank], gemm.b[rank]), 2 * gemm.expected(rank).float())
    return True


def test_in_a_compiled_graph():
    assert harness.run(WORLD, _compiled) == [True] * WORLD
