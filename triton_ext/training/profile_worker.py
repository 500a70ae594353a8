"""One rank of a tensor-parallel group that is profiled: started by `profile`, under torchrun."""

from __future__ import annotations

import math
import pickle
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import TritonExtError
from . import quota
from .model import load, shardable
from .profile import Task
from .profiler import measure

_MOST_WAIT_S = 60.0  # for a peer


def main(folder: Path) -> None:
    task: Task
    task, degree, settings, timeout_s = pickle.loads((folder / "order").read_bytes())
    signal.alarm(math.ceil(timeout_s))  # ends this rank even if nobody else does
    torch.set_num_threads(task.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=min(_MOST_WAIT_S, timeout_s)))
    rank = dist.get_rank()
    try:
        model = shardable(load(task.model, task.arguments), degree)
        model.shard(DeviceMesh("cpu", list(range(degree))))
    except TritonExtError as error:
        (folder / "error").write_text(str(error))
        raise
    with quota.joined(settings[rank] if settings else None):
        outcome = measure(
            {degree: model},
            task.samples,
            repeats=task.repeats,
            device=torch.device("cpu"),
            throttled=bool(settings),
        )
    if rank == 0:
        partial = folder / "result.partial"
        partial.write_bytes(pickle.dumps(outcome))
        partial.rename(folder / "result.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
