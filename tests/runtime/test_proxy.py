"""The thread that moves what plans send to other hosts: when it wakes, what it holds, and how it ends."""

import contextlib
import ctypes
import fcntl
import gc
import os
import platform
import re
import threading
import time
import weakref
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


class Stub:
    """A traffic without connections; what is not given does nothing."""

    has_followers = False
    is_whole = is_sent = True

    def __init__(self, pump=lambda: None):
        self.connections, self.calls, self._pump = {}, [], pump

    def pump(self):
        self._pump()

    def leave(self):
        self.calls.append("leave")

    def close(self):
        self.calls.append("close")


@contextlib.contextmanager
def in_the_proxy(stub):
    mine = proxy.proxy()
    mine.add(stub)
    yield mine
    with mine._lock:
        mine._traffics.remove(stub)


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_plan_that_the_collector_ends_in_the_proxys_own_thread(monkeypatch):
    """It may run at any allocation, there while the thread holds its lock."""

    def rank_main(rank):
        plan = tx.all_gather((4, 4), torch.float32)
        plan._state.itself = plan._state
        ended = weakref.ref(plan._state)
        groups.virtual_rank().exchange(None)
        if rank == 0:
            del plan
            with in_the_proxy(Stub(gc.collect)) as mine:
                while ended() is not None:
                    mine.wake()
                    time.sleep(0.01)
                is_free = mine._lock.acquire(timeout=2)
                assert is_free, "the proxy waits for itself"
                mine._lock.release()
        groups.virtual_rank().exchange(None)

    gc.collect()
    gc.disable()
    try:
        tx.testing.World(2, hosts=[0, 1]).run(rank_main)
    finally:
        gc.enable()


def test_a_plan_that_ends_behind_the_proxy_starts_none():
    def rank_main(rank):
        plan = tx.all_gather((4, 4), torch.float32)
        groups.virtual_rank().exchange(None)
        if rank == 0:
            proxy.stop()
            ended = weakref.ref(plan._state)
            del plan
            until(lambda: ended() is None)
            assert proxy._proxy is None
        groups.virtual_rank().exchange(None)

    tx.testing.World(2, hosts=[0, 1]).run(rank_main)


def test_the_end_of_a_process_waits_for_what_was_dropped():
    stub = Stub()
    mine = proxy.proxy()
    mine.add(stub)
    with mine._lock:  # the proxy cannot have taken it yet
        proxy.drop(stub, 5)
        assert not mine._retiring
    proxy.finish(5)
    assert stub.calls == ["leave", "close"]
    proxy.drop(stub, 5)  # again: it is gone
    proxy.finish(5)
    assert stub.calls == ["leave", "close"]


@pytest.mark.parametrize("ends", [lambda plan: plan.free(), lambda plan: None], ids=["freed", "in use"])
def test_a_forked_child_keeps_no_connection(ends):
    """Rank 0 is the gateway of rank 1, and has its connections until that one leaves."""

    def held():
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return found

    def rank_main(rank):
        plan = tx.all_gather((4, 4), torch.float32, schedule="hierarchical")
        traffic = plan._state.traffic
        if rank == 0:
            ends(plan)
            sockets = {f"socket:[{os.fstat(each.socket.fileno()).st_ino}]" for each in traffic.connections.values()}
            assert len(sockets) == 2 and sockets <= held()
            pid = os.fork()
            if pid == 0:
                os._exit(len(sockets & held()))
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        groups.virtual_rank().exchange(None)

    tx.testing.World(4, hosts=[0, 0, 1, 1]).run(rank_main)


@pytest.mark.parametrize("how", ["freed", "dropped"])
def test_memory_is_released_when_the_traffic_has_ended(how):
    """Although the plan itself is still referred to, and although the proxy sleeps."""
    kept, traffics = [], []

    def rank_main(rank):
        plan = tx.all_gather((4, 4), torch.float32)
        traffics.append(weakref.ref(plan._state.traffic))
        groups.virtual_rank().exchange(None)
        if how == "freed":
            plan.free()
            kept.append(plan)

    tx.testing.World(2, hosts=[0, 1]).run(rank_main)
    until(lambda: all(traffic() is None for traffic in traffics))
