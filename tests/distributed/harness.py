"""Real ranks: one process each, joined over gloo, with a pipe each to the test.

They are forked from a process that has imported everything, has no threads, and does nothing else.
"""

import atexit
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import triton_ext as tx
from triton_ext.emulate import Hosts
from triton_ext.emulate.hosts import _set_network as set_network

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "triton_ext.ops", "triton_ext.testing", "distributed.harness"])
TIMEOUT = timedelta(seconds=60)


class RankFailed(AssertionError):
    """at_s: when, on the machine's clock; what a rank never said is last."""

    def __init__(self, text, at_s=math.inf):
        super().__init__(text)
        self.at_s = at_s


class Job:
    """`world` processes that call function(rank, tell, *args); what they tell(), and what they return, is received."""

    def __init__(self, world, function, *args):
        handle, self._store = tempfile.mkstemp(prefix="triton-ext-store-")
        os.close(handle)
        os.unlink(self._store)
        self._pipes, self.processes = [], []
        for rank in range(world):
            self._start(rank, world, partial(dist.FileStore, self._store, world), function, args)

    def _start(self, rank, world, make_store, function, args):
        here, there = CONTEXT.Pipe()
        environment = dict(os.environ)  # the server has that of its own start
        process = CONTEXT.Process(target=_main, args=(environment, rank, world, make_store, there, function, args))
        process.start()
        there.close()
        self._pipes.append(here)
        self.processes.append(process)

    def receive(self, rank, timeout_s=120):
        """The next value that a rank told or returned. Raises RankFailed with its traceback if it failed."""
        if not self._pipes[rank].poll(timeout_s):
            raise RankFailed(f"rank {rank} said nothing for {timeout_s} s")
        kind, value, at_s = self._pipes[rank].recv()
        if kind != "value":
            raise RankFailed(f"rank {rank}: {value}", at_s)
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


class HostsJob(Job):
    """The same on emulated hosts, `ranks_per_host` ranks on each; `hosts` is there to cut links meanwhile."""

    def __init__(self, hosts, ranks_per_host, function, *args, rate="1gbit", mtu_bytes=1500):
        self._pipes, self.processes, self._store = [], [], ""
        self.hosts = Hosts(hosts, rate, mtu_bytes).__enter__()
        try:
            address, world = self.hosts.addresses[0], hosts * ranks_per_host
            with self.hosts.inside(0):  # the store is this process's, so that no rank that ends takes it along
                self._tcp_store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
            for rank in range(world):
                place = self.hosts.namespace(rank // ranks_per_host), self.hosts.interface
                self._start(rank, world, partial(_on_host, *place, address, self._tcp_store.port), function, args)
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def __exit__(self, *_):
        try:
            super().__exit__(*_)
        finally:
            self._tcp_store = None
            self.hosts.__exit__()


def run(world, function, *args):
    """Call function(rank, tell, *args) in `world` processes, and return their results."""
    with Job(world, function, *args) as job:
        return _results(job)


def run_on_hosts(hosts, ranks_per_host, function, *args, rate="1gbit", mtu_bytes=1500):
    """Call function(rank, tell, *args) in `ranks_per_host` processes on each of several emulated hosts. Needs root."""
    with HostsJob(hosts, ranks_per_host, function, *args, rate=rate, mtu_bytes=mtu_bytes) as job:
        return _results(job)


def _results(job):
    results, failures = [], []
    for rank in range(len(job.processes)):
        try:
            results.append(job.receive(rank))
        except RankFailed as failure:
            failures.append(failure)
    # The first one first: those behind it may only have lost their peer.
    assert not failures, "\n".join(map(str, sorted(failures, key=lambda failure: failure.at_s)))
    return results


def _on_host(namespace, interface, address, port):
    with Path("/run/netns", namespace).open() as there:
        set_network(there.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    return dist.TCPStore(address, port, timeout=TIMEOUT)


def _main(environment, rank, world, make_store, pipe, function, args):
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=make_store(), rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        tx.init()
        pipe.send(("value", function(rank, lambda value: pipe.send(("value", value, None)), *args), None))
    except BaseException:
        pipe.send(("error", traceback.format_exc(), time.monotonic()))
        os._exit(1)
    tx.shutdown()
    dist.destroy_process_group()
    atexit._run_exitfuncs()  # a forked process ends without them
