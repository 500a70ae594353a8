"""A cluster of this machine's CPU quotas: their speeds, and what gloo carries between them.

A process with a quota communicates with it, too: its messages are copied in the time that it gets. So each pair of
devices has a link of its own, measured while nothing else is sent.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..planner.cluster import Cluster, DeviceType, Fabric, Link, Node
from . import launch, quota

_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 1 << 20
_STREAMS, _STREAM_S = 3, 0.4
_MATRIX = 384
_COPY_BYTES = 32 << 20
_MOST_WAIT_S = 60.0


def measure(quotas: Sequence[float], timeout_s: float = 120.0) -> Cluster:
    """The cluster of devices named cpu-QUOTA, each a node, in the order given.

    A device's peak is its float32 throughput. Raises PlanningError for quotas that cannot be, and if a rank fails.
    """
    launch.check_timeout(timeout_s)
    with tempfile.TemporaryDirectory(prefix="triton-ext-links-") as name, quota.quotas(quotas) as limits:
        folder = Path(name)
        settings = [limits.setting(rank) for rank in range(len(quotas))]
        (folder / "order").write_bytes(pickle.dumps((settings, timeout_s)))
        launch.torchrun("triton_ext.training.links", folder, len(quotas), 1, timeout_s, None)
        figures = json.loads((folder / "result.json").read_text())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(quotas)
    types: dict[str, DeviceType] = {}
    nodes = []
    for rank, (cores, speed) in enumerate(zip(quotas, figures["devices"], strict=True)):
        kind = f"cpu-{cores:g}"
        types.setdefault(kind, DeviceType(kind, memory_bytes, *speed))
        nodes.append(Node(f"rank{rank}", (kind,), Fabric(speed[1], 0.0)))  # nobody to send to: a copy in its memory
    links = [
        Link(f"rank{source}", f"rank{destination}", bandwidth_bytes_per_s, latency_s)
        for one, other, bandwidth_bytes_per_s, latency_s in figures["pairs"]
        for source, destination in ((one, other), (other, one))
    ]
    return Cluster(tuple(types.values()), tuple(nodes), links=tuple(links))


def _main(folder: Path) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    settings, timeout_s = pickle.loads((folder / "order").read_bytes())
    signal.alarm(math.ceil(timeout_s))  # ends this rank even if nobody else does
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=min(_MOST_WAIT_S, timeout_s)))
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs: list[tuple[int, int, float, float]] = []
    with quota.joined(settings[rank]):
        devices: list[Any] = [None] * world
        dist.all_gather_object(devices, _speed())
        for one in range(world):
            for other in range(one + 1, world):
                dist.barrier()
                if rank not in (one, other):
                    continue
                peer = other if rank == one else one
                small, large = (
                    statistics.median(_one_way_s(peer, rank == one, size) for _ in range(_STREAMS))
                    for size in (_SMALL_BYTES, _LARGE_BYTES)
                )
                if rank == one:
                    small = min(small, large / 2)  # on a busy machine, a stream of small messages may be the slower one
                    pairs.append((one, other, (_LARGE_BYTES - _SMALL_BYTES) / (large - small), small))
        found: list[Any] = [None] * world
        dist.all_gather_object(found, pairs)
    if rank == 0:
        partial = folder / "result.partial"
        partial.write_text(json.dumps({"devices": devices, "pairs": [pair for part in found for pair in part]}))
        partial.rename(folder / "result.json")
    dist.barrier()
    dist.destroy_process_group()


def _speed() -> tuple[float, float]:
    """flop/s and bytes/s of this process."""
    import torch

    matrix, source = torch.ones(_MATRIX, _MATRIX), torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _MATRIX**3 / _seconds(lambda: matrix @ matrix), 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source))


def _seconds(action: Any) -> float:
    """The mean of as many as take a quarter of a second: many periods of a quota."""
    action()
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < 0.25:
        action()
        count += 1
    return elapsed / count


def _one_way_s(peer: int, sends: bool, size: int) -> float:
    """A message's share of a stream of them, long enough for many periods of a quota. The first element is 1 in the
    last message."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(size // 4)
    count, began = 0, time.perf_counter()
    while message[0] == 0:
        if sends:
            message[0] = time.perf_counter() - began > _STREAM_S
            dist.send(message, peer)
        else:
            dist.recv(message, peer)
        count += 1
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
