"""Operators run a library's collective where that was measured to be faster, and only there."""

import os

import torch

import triton_ext as tx
from collectives import assert_close
from distributed import harness
from ops.cases import Embedding, Gemm, Gemv
from triton_ext.ops import embedding, gemm, gemv
from triton_ext.planner import cluster_file, measurements
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node
from triton_ext.planner.measurements import CollectiveTime, Measurements, RankFigures

WORLD = 2
FAST_S, SLOW_S = 1e-9, 1e4


OPERATORS = gemm, gemv, embedding
CPU = DeviceType("CPU", 1 << 30, 1e11, 1e10)


def write(directory, seconds, world=WORLD, largest_bytes=1 << 30, fabric_s=1.0):
    """A cluster file, and what its probe measured of a library. fabric_s: what a fused kernel needs, at least."""
    directory.mkdir(exist_ok=True)
    path = directory / "cluster.yaml"
    cluster_file.dump(Cluster((CPU,), (Node("host", ("CPU",) * WORLD, Fabric(1e9, fabric_s)),)), path)
    rank = RankFigures("host", "CPU", "cpu", 1, 1 << 30, 1e10, 1e10, 1e10)
    points = tuple(
        CollectiveTime(collective, nbytes, seconds, seconds, 3)
        for collective in ("all_reduce", "all_to_all")
        for nbytes in (4, largest_bytes)
    )
    measurements.dump(Measurements("gloo", (rank,) * world, (), points), measurements.path_beside(path))
    return path


#: What was measured, and whether operators then run the library's collective.
MEASURED = [
    ({"seconds": FAST_S}, True),
    ({"seconds": SLOW_S}, False),
    ({"seconds": FAST_S, "world": 3}, False),  # of another group
    ({"seconds": FAST_S, "largest_bytes": 8}, False),  # of smaller tensors
]


def _ways(rank, tell, directory):
    """For each of MEASURED and each operator, whether it ran the library's collective."""
    found = []
    for number, (measured, _) in enumerate(MEASURED):
        os.environ["TRITON_EXT_CLUSTER"] = str(write(directory / f"{rank}.{number}", **measured))
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
    monkeypatch.setenv("TRITON_EXT_CLUSTER", str(write(tmp_path, 2e-3, fabric_s=1e-6)))
    for is_faster, text in harness.run(WORLD, _explained):
        assert not is_faster
        assert "unfused: plans are fused; the computation, then a library, take 3000.00 us in all, measured" in text


def test_virtual_ranks_have_no_library(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_CLUSTER", str(write(tmp_path, FAST_S)))
    case = Gemm(WORLD)
    for rank, result in enumerate(tx.testing.World(WORLD).run(case.call)):
        assert_close(result, case.expected(rank).float())
