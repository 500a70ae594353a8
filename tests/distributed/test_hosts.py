"""Ranks on emulated hosts: plain torch.distributed over their links, and what a cut link does to it."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from distributed import harness
from emulation import require_hosts

NBYTES = 4 << 20


@pytest.fixture(autouse=True)
def _hosts():
    require_hosts()


def _all_reduce(rank, tell):
    tensor = torch.full((NBYTES // 4,), float(rank))
    dist.all_reduce(tensor)  # connects
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(tensor)
    return os.readlink("/proc/self/ns/net"), tensor[0].item(), tensor[-1].item(), time.perf_counter() - start


@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 2), (3, 1)])
def test_all_reduce(hosts, ranks_per_host):
    world = hosts * ranks_per_host
    results = harness.run_on_hosts(hosts, ranks_per_host, _all_reduce)
    expected = world * sum(range(world))
    assert all(result[1:3] == (expected, expected) for result in results)
    namespaces = [result[0] for result in results]
    assert namespaces == [namespaces[rank - rank % ranks_per_host] for rank in range(world)]
    assert len({*namespaces, os.readlink("/proc/self/ns/net")}) == hosts + 1
    # At least half of the tensor crosses each link in each direction, at 125 MB/s less its burst of 1 ms.
    assert min(result[3] for result in results) > (NBYTES / 2) / 125e6 - 2e-3


def _fails(rank, tell):
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def test_a_failure_is_reported():
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        harness.run_on_hosts(2, 1, _fails)


def _barriers(rank, tell):
    group = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(group)
    tell("ready")
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            dist.barrier(group)
    except RuntimeError:
        return "noticed"
    return "never noticed"


def test_a_link_is_cut():
    with harness.HostsJob(2, 1, _barriers) as job:
        assert [job.receive(rank) for rank in range(2)] == ["ready"] * 2
        job.hosts.cut(1)
        assert [job.receive(rank) for rank in range(2)] == ["noticed"] * 2
        job.hosts.restore(1)
