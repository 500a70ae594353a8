"""Joining and leaving a job."""

from __future__ import annotations

import os

import torch.distributed as dist

from . import groups, plans, proxy, trace
from .transports import nvshmem

_owns_group = False


def init() -> dist.ProcessGroup:
    """Join the job that torchrun's environment describes, and return the group of all its ranks.

    Uses the process group that exists, or makes a gloo one. Without torchrun the job has one rank.
    """
    global _owns_group
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _owns_group = True
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def shutdown() -> None:
    """Free this process's plans, leave NVSHMEM, and end the process group if init() made it.

    Collective in a job that has used NVSHMEM.
    """
    global _owns_group
    plans.free_all(None)
    proxy.finish(groups.timeout_s())
    trace.stop()
    nvshmem.close()
    if _owns_group and dist.is_initialized():
        dist.destroy_process_group()
    _owns_group = False
