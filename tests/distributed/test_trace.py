"""What two processes record, put together."""

import time

import torch
import torch.distributed as dist

import triton_ext as tx
from collectives import inputs, launch
from distributed import harness
from triton_ext import timeline

LATE_S = 0.05


def _late_at_the_second_run(rank, tell):
    plan = tx.all_to_all((64, 48), torch.float32)
    tensor = inputs(2, (64, 48), torch.float32)[rank]
    launch(plan, tensor)  # compiles
    dist.barrier()
    if rank == 1:
        time.sleep(LATE_S)
    launch(plan, tensor)
    return plan.grid(16, 16)[0]


def test_a_rank_waits_for_the_one_that_is_late(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_TRACE", str(tmp_path / "trace"))
    [programs, _] = harness.run(2, _late_at_the_second_run)
    ranks = timeline.load(tmp_path / "trace")
    assert [(rank.rank, rank.world, rank.dropped, len(rank.launches)) for rank in ranks] == [(0, 2, 0, 2), (1, 2, 0, 2)]
    for each in (each for rank in ranks for each in rank.launches):
        assert sorted(program.index for program in each.programs) == list(range(programs))
    [early, late] = (rank.launches[1] for rank in ranks)
    longest = max(early.waits, key=lambda wait: wait.end_ns - wait.begin_ns)
    assert (longest.cause, longest.peer) == ("ready", 1)
    assert LATE_S * 0.8e9 < longest.end_ns - longest.begin_ns < 5e9
    # One clock: rank 0 stops waiting when rank 1 begins.
    assert abs(longest.end_ns - late.begin_ns) < 20e6
    timeline.draw(ranks, 1, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 5000
