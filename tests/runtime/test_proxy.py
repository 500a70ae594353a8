"""The proxy notices what nobody rings for."""

import fcntl
import time

import pytest
import torch
from triton import knobs

import triton_ext as tx
from collectives import assert_close, inputs, launch
from triton_ext.runtime import connection, groups, proxy


@pytest.fixture
def late_rank():
    """Behind the proxy's own hook: rank 1's launches wait for a core before their kernel begins."""

    def wait(_metadata):
        if groups.virtual_rank().rank == 1:
            time.sleep(0.05)

    proxy.proxy()
    knobs.runtime.launch_enter_hook.add(wait)
    yield
    knobs.runtime.launch_enter_hook.remove(wait)


def test_a_run_that_begins_late(late_rank, monkeypatch):
    """Rank 1 of a broadcast sends nothing but the word that it has begun."""
    monkeypatch.setenv("TRITON_EXT_TIMEOUT_S", "5")
    tensors = inputs(2, (4, 4), torch.float32)

    def rank_main(rank):
        plan = tx.broadcast((4, 4), torch.float32)
        for _ in range(4):
            assert_close(launch(plan, tensors[rank]), tensors[0])

    tx.testing.World(2, hosts=[0, 1]).run(rank_main)


def test_a_connection_that_is_closed_while_a_rank_waits_for_its_end(monkeypatch):
    """Whatever the timing: what a rank asks of a connection takes long here."""

    def ioctl(*arguments):
        time.sleep(0.003)
        return fcntl.ioctl(*arguments)

    class Slow:
        def __getattr__(self, name):
            return ioctl if name == "ioctl" else getattr(fcntl, name)

    monkeypatch.setattr(connection, "fcntl", Slow())
    tensors = inputs(2, (4, 4), torch.float32)

    def rank_main(rank):
        for _ in range(10):
            plan = tx.all_reduce((4, 4), torch.float32)
            assert_close(launch(plan, tensors[rank]), tensors[0] + tensors[1])
            plan.free()

    tx.testing.World(2, hosts=[0, 1]).run(rank_main)
