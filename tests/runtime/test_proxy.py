"""The proxy notices what nobody rings for."""

import time

import pytest
import torch
from triton import knobs

import triton_ext as tx
from collectives import assert_close, inputs, launch
from triton_ext.runtime import groups, proxy


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
