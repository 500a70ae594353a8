"""Times of torch.distributed's collectives over the whole group: what a fused kernel competes with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..planner.measurements import CollectiveTime
from ..runtime.groups import ProcessRanks
from .devices import synchronize

_SIZES = tuple(1 << exponent for exponent in range(12, 26, 2))  # bytes of a rank's tensor, about
_LONGEST_S = 0.2
_PER_SIZE_S = 0.1
_REPETITIONS = (3, 30)
_ITEM_BYTES = 4
# Newer names of the same, where torch has them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def measure(name: str, device: torch.device, group: ProcessRanks) -> list[CollectiveTime]:
    """One collective of float32 at growing sizes; called by all ranks, known to all.

    A time is that of the last rank to finish; sizes end where one takes too long.
    """
    found: list[CollectiveTime] = []
    repetitions = _REPETITIONS[1]
    for nbytes in _SIZES:
        items = -(-nbytes // _ITEM_BYTES // group.size) * group.size  # each rank has as many
        run = _call(name, items, group.size, device)
        run()  # warms up
        own = []
        for _ in range(repetitions):
            dist.barrier(group.group)
            start = time.perf_counter()
            run()
            synchronize(device)
            own.append(time.perf_counter() - start)
        times = [max(each) for each in zip(*group.exchange(own), strict=True)]
        seconds = statistics.median(times)
        found.append(CollectiveTime(name, items * _ITEM_BYTES, seconds, min(times), repetitions))
        if seconds * 4 > _LONGEST_S:
            break
        repetitions = round(min(max(_PER_SIZE_S / seconds, _REPETITIONS[0]), _REPETITIONS[1]))
    return found


def _call(name: str, items: int, world: int, device: torch.device) -> Callable[[], object]:
    tensor = torch.ones(items, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if name == "all_to_all":
        received = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(received, tensor)
    if name == "all_gather":
        gathered = torch.empty(items * world, device=device)
        return lambda: _all_gather(gathered, tensor)
    if name == "reduce_scatter":
        part = torch.empty(items // world, device=device)
        return lambda: _reduce_scatter(part, tensor)
    return lambda: dist.broadcast(tensor, 0)
