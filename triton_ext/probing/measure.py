"""Every measurement of a group of ranks, in an order that all ranks keep."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import PlanError, ProbeError
from ..planner.measurements import CollectiveTime, Load, Measurements, Point, RankFigures, Transfer, Transport
from ..runtime.groups import ProcessRanks
from ..runtime.memory import host_of
from . import collectives, devices
from .messages import Messenger
from .stores import Storer

_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

Progress = Callable[[str, int, int], None]  # what is measured, how many steps are done, of how many


def measure(device: torch.device, control: dist.ProcessGroup, progress: Progress) -> Measurements:
    """Measure the default group: its ranks' devices, transfers between all of them, and their collectives. Collective.

    `control` is the same ranks over gloo. Raises ProbeError if a rank does not answer in the group's timeout.
    """
    group = ProcessRanks(control)
    try:
        hosts = _host_names(group)
        progress("devices", 0, 1)
        ranks = _figures(device, group, hosts)
        transfers = _messages(device, control, progress)
        if all(kind == "cpu" for kind in group.exchange(device.type)):
            transfers += _stores(group, progress)
        times: list[CollectiveTime] = []
        for number, name in enumerate(_COLLECTIVES if group.size > 1 else ()):
            progress(name, number, len(_COLLECTIVES))
            times += collectives.measure(name, device, group)
        gathered = [transfer for part in group.exchange(transfers) for transfer in part]
    except (RuntimeError, PlanError) as error:
        raise ProbeError(f"rank {group.rank} of {group.size}: a rank did not answer: {error}") from error
    gathered.sort(key=lambda t: (t.transport, t.load, t.source, t.destination))
    return Measurements(dist.get_backend(), tuple(ranks), tuple(gathered), tuple(times))


def _host_names(group: ProcessRanks) -> list[str]:
    """Each rank's host: its own name, with a number where several have the same."""
    places = group.exchange((socket.gethostname() or "host", host_of(group)))
    names: dict[tuple[str, str], str] = {}
    for name, host in places:
        same = {place for place in places if place[0] == name}
        number = len([known for known in names if known[0] == name])
        names.setdefault((name, host), f"{name}-{number}" if len(same) > 1 else name)
    return [names[place] for place in places]


def _figures(device: torch.device, group: ProcessRanks, hosts: list[str]) -> list[RankFigures]:
    """All ranks measure at the same time, as all compute at the same time in a job."""
    group.exchange(None)
    float32 = devices.flop_per_s(device, torch.float32)
    group.exchange(None)
    bfloat16 = devices.flop_per_s(device, torch.bfloat16)
    group.exchange(None)
    bandwidth = devices.memory_bandwidth_bytes_per_s(device)
    host = hosts[group.rank]
    memory = devices.memory_bytes(device, hosts.count(host))
    threads = torch.get_num_threads()
    names = devices.device_name(device), devices.device_type(device)
    return group.exchange(RankFigures(host, *names, threads, memory, float32, bfloat16, bandwidth))


def _messages(device: torch.device, control: dist.ProcessGroup, progress: Progress) -> list[Transfer]:
    """The transfers that this rank has timed."""
    messenger, group = Messenger(device, control), ProcessRanks(control)
    rank, world = group.rank, group.size
    steps, step = world * (world - 1) * 3 // 2, 0
    found: list[Transfer] = []
    for source in range(world):
        for destination in range(world):
            if source != destination:
                progress(f"messages from {source} to {destination}", step, steps)
                dist.barrier(control)
                if rank in (source, destination):
                    found += _transfer(source, destination, "messages", "alone", messenger.one_way(source, destination))
                step += 1
    for low in range(world):
        for high in range(low + 1, world):
            progress(f"messages between {low} and {high}, both ways", step, steps)
            dist.barrier(control)
            if rank in (low, high):
                peer = low + high - rank
                found += _transfer(peer, rank, "messages", "both_ways", messenger.both_ways(peer))
            step += 1
    if world > 1:
        progress("messages between all ranks at once", step, steps)
        widths = [((t.source, t.destination), t.line.bandwidth_bytes_per_s) for t in found if t.load == "alone"]
        everyones = dict(pair for part in group.exchange(widths) for pair in part)
        for peer, points in messenger.all_pairs(everyones).items():
            found += _transfer(peer, rank, "messages", "all_pairs", points)
    return found


def _stores(group: ProcessRanks, progress: Progress) -> list[Transfer]:
    """The same for stores to the memory of ranks on the same host."""
    storer, rank = Storer(group), group.rank
    found: list[Transfer] = []
    for source in range(group.size):
        for destination in range(group.size):
            if source != destination:
                progress(f"stores from {source} to {destination}", source * group.size + destination, group.size**2)
                dist.barrier(group.group)
                peer = source + destination - rank
                if rank in (source, destination) and storer.reaches(peer):
                    found += _transfer(source, destination, "memory", "alone", storer.one_way(source, destination))
    for peer, points in storer.all_pairs().items():
        found += _transfer(rank, peer, "memory", "all_pairs", points)
    return found


def _transfer(source: int, destination: int, transport: Transport, load: Load, points: list[Point]) -> list[Transfer]:
    return [Transfer(source, destination, transport, load, tuple(points))] if points else []


def device_of_rank() -> torch.device:
    """The GPU of this rank, by LOCAL_RANK, if there is one for each rank of the host; the CPU otherwise."""
    local_rank, local_world = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= max(local_world, 1):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
