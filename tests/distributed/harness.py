"""Real ranks: one process each, joined over gloo, with a pipe each to the test."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

import triton_ext as tx

CONTEXT = multiprocessing.get_context("spawn")


class Job:
    """`world` processes that call function(rank, tell, *args); what they tell(), and what they return, is received."""

    def __init__(self, world, function, *args):
        handle, self._store = tempfile.mkstemp(prefix="triton-ext-store-")
        os.close(handle)
        os.unlink(self._store)
        self._pipes, self.processes = [], []
        for rank in range(world):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_main, args=(rank, world, self._store, there, function, args))
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def receive(self, rank, timeout_s=120):
        """The next value that a rank told or returned. Raises AssertionError with its traceback if it failed."""
        assert self._pipes[rank].poll(timeout_s), f"rank {rank} said nothing for {timeout_s} s"
        kind, value = self._pipes[rank].recv()
        assert kind == "value", f"rank {rank}: {value}"
        return value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.join(0 if _[0] else 30)
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        if os.path.exists(self._store):
            os.unlink(self._store)


def run(world, function, *args):
    """Call function(rank, tell, *args) in `world` processes, and return their results."""
    with Job(world, function, *args) as job:
        results, failures = [], []
        for rank in range(world):
            try:
                results.append(job.receive(rank))
            except AssertionError as failure:
                failures.append(str(failure))
        # Who lost a peer says nothing of what the peer died of.
        assert not failures, "\n".join(sorted(failures, key=lambda text: "PeerLost" in text))
        return results


def _main(rank, world, store, pipe, function, args):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        tx.init()
        pipe.send(("value", function(rank, lambda value: pipe.send(("value", value)), *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        os._exit(1)
    tx.shutdown()
    dist.destroy_process_group()
