"""The thread that moves what plans send to other hosts: when it wakes up, and how it ends."""

import ctypes
import fcntl
import platform
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

import triton_ext as tx
from collectives import assert_close, inputs, launch
from triton_ext.runtime import connection, groups, proxy, scheduling


@pytest.fixture
def late_rank():
    """Rank 1's launches wait for a core before their kernel begins."""

    def wait(_metadata):
        if groups.virtual_rank().rank == 1:
            time.sleep(0.05)

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


@triton.jit
def fill(out):
    tl.store(out, 1.0)


def test_the_proxy_sleeps_while_kernels_run_that_are_none_of_its():
    tensors, measured = inputs(2, (4, 4), torch.float32), threading.Event()

    def wakes():
        status = Path(f"/proc/self/task/{proxy.proxy()._thread.native_id}/status").read_text()
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[1])

    def rank_main(rank):
        launch(tx.all_to_all((4, 4), torch.float32), tensors[rank])
        if rank:
            assert measured.wait(30)
            return None
        before, deadline = -1, time.monotonic() + 40
        while before != wakes():  # the run's last messages, and plans of other tests that end
            assert time.monotonic() < deadline
            before = wakes()
            time.sleep(0.05)
        for _ in range(100):
            fill[(1,)](tensors[0])
        time.sleep(0.05)
        measured.set()
        return wakes() - before

    assert tx.testing.World(2, hosts=[0, 1]).run(rank_main)[0] == 0


def test_it_asks_to_run_soon():
    """Of its own slices, the kernel says so from 6.12 on."""
    if (
        tuple(map(int, platform.release().split(".")[:2])) < (6, 12)
        or platform.machine() not in scheduling._SCHED_SETATTR
    ):
        pytest.skip("the kernel has no time slices of a thread")
    attributes = ctypes.create_string_buffer(scheduling._ATTRIBUTES.size)
    thread = proxy.proxy()._thread.native_id
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        assert (
            ctypes.CDLL(None).syscall(scheduling._SCHED_SETATTR[platform.machine()] + 1, thread, attributes, 48, 0) == 0
        )
        if scheduling._ATTRIBUTES.unpack(attributes.raw)[5] == scheduling._SLICE_NS:
            return
    raise AssertionError(scheduling._ATTRIBUTES.unpack(attributes.raw))
