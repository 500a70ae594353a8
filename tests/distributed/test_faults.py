"""Ranks that die: the others end with an error that names the rank, nothing stays behind, the next job starts clean."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import triton_ext as tx
from collectives import assert_close, inputs, launch, reference
from distributed import harness

WORLD = 3
VICTIM = 2


def _runs_until_a_rank_is_gone(rank, tell, when):
    tensors = inputs(WORLD, (64, 32), torch.float32)
    plan = tx.all_reduce((64, 32), torch.float32)
    launch(plan, tensors[rank])  # compiles
    dist.barrier()
    tell("ready")
    try:
        if when == "before" and rank == VICTIM:
            time.sleep(60)
        if when == "after":
            assert_close(launch(plan, tensors[rank]), reference("all_reduce", tensors, rank).float())
            dist.barrier()
            if rank == VICTIM:
                time.sleep(60)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            launch(plan, tensors[rank])
        tell("never noticed")
    except tx.errors.TritonExtError as error:
        tell(f"{type(error).__name__}: {error}")
    os._exit(0)  # the process group has lost a member: its destructor would complain


@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_a_killed_rank(when):
    before = set(os.listdir("/dev/shm"))
    with harness.Job(WORLD, _runs_until_a_rank_is_gone, when) as job:
        for rank in range(WORLD):
            assert job.receive(rank) == "ready"
        time.sleep(0.3)
        job.processes[VICTIM].kill()
        killed = time.monotonic()
        for rank in set(range(WORLD)) - {VICTIM}:
            text = job.receive(rank, 60)
            assert text.startswith("PeerLost") and f"rank {VICTIM}" in text, text
        assert time.monotonic() - killed < 10, "noticed long before the timeout"
    assert [name for name in set(os.listdir("/dev/shm")) - before if "triton_ext" in name] == []
    assert harness.run(WORLD, _one_run) == [True] * WORLD, "the next job starts clean"


def _one_run(rank, tell):
    tensors = inputs(WORLD, (64, 32), torch.float32)
    plan = tx.all_reduce((64, 32), torch.float32)
    assert_close(launch(plan, tensors[rank]), reference("all_reduce", tensors, rank).float())
    return True


def test_interrupt_ends_all_ranks(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            import torch, triton_ext as tx
            from collectives import launch
            tx.init()
            plan = tx.all_reduce((64, 32), torch.float32)
            launch(plan, torch.ones(64, 32))
            print("running", flush=True)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                launch(plan, torch.ones(64, 32))
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True
    )
    try:
        assert job.stdout.readline().startswith("running")
        os.killpg(job.pid, signal.SIGINT)
        job.wait(timeout=60)
        for _ in range(100):  # until nobody of the session is left
            try:
                os.killpg(job.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail("a rank survived the interrupt")
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun ends its ranks, which are not of its session
            job.wait(timeout=60)
        job.stdout.close()
