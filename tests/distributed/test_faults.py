"""Ranks that die: the others end with an error that names the rank, nothing stays behind, the next job starts clean."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from collectives import assert_close, inputs, launch, reference

import triton_ext as tx

WORLD = 3
VICTIM = 2


def _main(rank, store, when, outcome):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timedelta(seconds=30)
    )
    tx.init()
    tensors = inputs(WORLD, (64, 32), torch.float32)
    plan = tx.all_reduce((64, 32), torch.float32)
    launch(plan, tensors[rank])  # compiles
    dist.barrier()
    outcome.put((rank, "ready"))
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
        outcome.put((rank, "never noticed"))
    except tx.errors.TritonExtError as error:
        outcome.put((rank, f"{type(error).__name__}: {error}"))
    os._exit(0)  # the process group has lost a member: its destructor would complain


def job(tmp_path, when):
    """Start a job, kill a rank, and return what the others said, and after how many seconds."""
    context = multiprocessing.get_context("spawn")
    outcome = context.Queue()
    store = str(tmp_path / f"store-{time.monotonic_ns()}")
    processes = [context.Process(target=_main, args=(rank, store, when, outcome)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        for _ in range(WORLD):
            assert outcome.get(timeout=120)[1] == "ready"
        time.sleep(0.3)
        processes[VICTIM].kill()
        start = time.monotonic()
        said = dict(outcome.get(timeout=60) for _ in range(WORLD - 1))
        return said, time.monotonic() - start
    finally:
        for process in processes:
            process.kill()
            process.join(10)


@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_a_killed_rank(tmp_path, when):
    before = sorted(os.listdir("/dev/shm"))
    said, seconds = job(tmp_path, when)
    assert sorted(said) == [0, 1]
    for text in said.values():
        assert text.startswith("PeerLost") and f"rank {VICTIM}" in text, text
    assert seconds < 10
    assert [name for name in os.listdir("/dev/shm") if name not in before and "triton_ext" in name] == []


def test_interrupt_ends_all_ranks(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            import torch, triton_ext as tx
            from collectives import launch
            tx.init()
            plan = tx.all_reduce((64, 32), torch.float32)
            launch(plan, torch.ones(64, 32))
            print("running", flush=True)
            while True:
                launch(plan, torch.ones(64, 32))
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True
    )
    try:
        assert job.stdout.readline().strip() == "running"
        os.killpg(job.pid, signal.SIGINT)
        job.wait(timeout=60)
        with pytest.raises(ProcessLookupError):  # nobody of the session is left
            for _ in range(100):
                os.killpg(job.pid, 0)
                time.sleep(0.1)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.stdout.close()
