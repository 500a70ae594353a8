"""Joining and leaving a job."""

from __future__ import annotations

import os

import torch.distributed as dist

from ..errors import JobError
from . import groups, plans, proxy, trace
from . import network_class as classes
from .transports import nvshmem

_owns_group = False
_network_class: classes.NetworkClass | None = None


def init(priority: int | None = None, path_class: int | None = None) -> dist.ProcessGroup:
    """Join the job that torchrun's environment describes, and return the group of all its ranks. Collective.

    Uses the process group that exists, or makes a gloo one. Without torchrun the job has one rank.

    `priority` (0 goes first, at most 63) and `path_class` (0 to 16383) say how the network is to treat the job; where
    they are not given, TRITON_EXT_PRIORITY and TRITON_EXT_PATH_CLASS do, and where neither is, nothing does. All ranks
    must be told the same; `network_class()` returns it. Raises JobError, on every rank, for other values.
    """
    global _owns_group, _network_class
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _owns_group = True
    assert dist.group.WORLD is not None
    _network_class = classes.agree(groups.ProcessRanks(dist.group.WORLD), priority, path_class)
    return dist.group.WORLD


def network_class() -> classes.NetworkClass:
    """The priority and the path class that the job was told at `init()`. Raises JobError before it."""
    if _network_class is None:
        raise JobError("this process has not joined a job: call tx.init() first")
    return _network_class


def shutdown() -> None:
    """Free this process's plans, leave NVSHMEM, and end the process group if init() made it.

    Collective in a job that has used NVSHMEM.
    """
    global _owns_group, _network_class
    _network_class = None
    plans.free_all(None)
    proxy.finish(groups.timeout_s())
    trace.stop()
    nvshmem.close()
    if _owns_group and dist.is_initialized():
        dist.destroy_process_group()
    _owns_group = False


def _forget() -> None:
    global _owns_group
    _owns_group = False  # a forked child's process group is its parent's


os.register_at_fork(after_in_child=_forget)
