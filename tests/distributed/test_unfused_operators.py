"""Operators run a library's collective where that was measured to be faster, and only there."""

import os

import torch

import cluster_files
import triton_ext as tx
from collectives import assert_close
from distributed import harness
from ops.cases import Embedding, Gemm, Gemv
from triton_ext.ops import embedding, gemm, gemv
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node

WORLD = 2
FAST_S, SLOW_S = 1e-9, 1e4


OPERATORS = gemm, gemv, embedding
CPU = DeviceType("CPU", 1 << 30, 1e11, 1e10)


def written(directory, fabric_s=1.0, world=WORLD, **library):
    """fabric_s: what a fused kernel takes, at least."""
    cluster = Cluster((CPU,), (Node("host", ("CPU",) * WORLD, Fabric(1e9, fabric_s)),))
    return str(cluster_files.write(directory, cluster, ["host"] * world, **library))


#: What was measured, and whether operators then run the library's collective.
MEASURED = [
    ({"library_s": FAST_S}, True),
    ({"library_s": SLOW_S}, False),
    ({"library_s": FAST_S, "world": 3}, False),  # of another group
    ({"library_s": FAST_S, "largest_bytes": 8}, False),  # of smaller tensors
]


def _ways(rank, tell, directory):
    """For each of MEASURED and each operator, whether it ran the library's collective."""
    found = []
    for number, (measured, _) in enumerate(MEASURED):
        os.environ["TRITON_EXT_CLUSTER"] = written(directory / f"{rank}.{number}", **measured)
        # Other shapes each time, or the plans would be those of the time before.
        cases = Gemm(WORLD, m=67 + number), Gemv(WORLD, n=70 + number), Embedding(WORLD, samples=21 + number)
        found.append([_is_unfused(module, case, rank) for module, case in zip(OPERATORS, cases, strict=True)])
    return found


def _is_unfused(module, case, rank):
    calls = 0

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return unfused(*arguments)

    unfused, module.unfused = module.unfused, counted
    try:
        for _ in range(2):
            assert_close(case.call(rank), case.expected(rank).float())
        assert calls in (0, 2)
        assert_close(case.call(rank, plan=case.plan(rank)), case.expected(rank).float())  # a plan is always fused
    finally:
        module.unfused = unfused
    return calls == 2


def test_what_was_measured_decides(tmp_path):
    expected = [[is_unfused] * len(OPERATORS) for _, is_unfused in MEASURED]
    assert harness.run(WORLD, _ways, tmp_path) == [expected] * WORLD


def _explained(rank, tell):
    plan = tx.all_reduce((4, 64), torch.float32, compute_s=1e-3)
    return plan.is_unfused_faster, str(plan.explain())


def test_a_plan_says_what_the_library_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_CLUSTER", written(tmp_path, 1e-6, library_s=2e-3))
    for is_faster, text in harness.run(WORLD, _explained):
        assert not is_faster
        assert "unfused: plans are fused; the computation, then a library, take 3000.00 us in all, measured" in text


def test_virtual_ranks_have_no_library(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_CLUSTER", written(tmp_path, library_s=FAST_S))
    case = Gemm(WORLD)
    for rank, result in enumerate(tx.testing.World(WORLD).run(case.call)):
        assert_close(result, case.expected(rank).float())
