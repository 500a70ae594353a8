"""Symmetric memory: one segment per rank, which every rank of the group can address."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ..backends.cpu import ranges
from ..errors import PlanError
from .groups import Group, ThreadRanks
from .transports import nvshmem, p2p


class MemoryRegion(NamedTuple):
    """A part of one rank's symmetric memory. words, per_run: names of its 8-byte words, and by how much a run grows
    them, where it consists of words.
    """

    name: str
    address: int
    nbytes: int
    unit_bytes: int
    shape: tuple[int, ...] = ()
    words: dict[int, str] = {}  # noqa: RUF012
    per_run: dict[int, int] = {}  # noqa: RUF012


class SymmetricMemory:
    """This rank's segment, zeroed, and the address of every rank's segment, as seen from here.

    Between processes the segment is an anonymous file (memfd): it never has a name, so a crash leaves nothing
    behind, and it lives as long as some rank maps it. Between virtual ranks it is ordinary memory of the device.
    """

    local: torch.Tensor  #: uint8[nbytes]
    segments: list[torch.Tensor]
    addresses: list[int | None]  #: None for a segment that loads and stores do not reach
    remote: list[tuple[int, int]]  #: how NVSHMEM names each segment: its processing element, and an address

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        """Collective. Raises PlanError where ranks cannot map each other's memory."""
        if isinstance(group, ThreadRanks):
            hosts = group.exchange(host_of(group))
            if len(set(hosts)) > 1 and device.type == "cuda":
                self._keep = nvshmem.Segment(nvshmem.heap(nvshmem.Alone(), device), nbytes)
                self.local = self._keep.local
            else:
                self.local = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            self.segments = group.exchange(self.local)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found = [segment.data_ptr() for segment in self.segments]
            own = hosts[group.rank]
            self.addresses = [at if host == own else None for at, host in zip(found, hosts, strict=True)]
            self.remote = [(0, address) for address in found]
        elif device.type == "cpu":
            self.segments = _map_all(group, nbytes)
            self.local = self.segments[group.rank]
            self.addresses = [segment.data_ptr() for segment in self.segments]
        elif device.type == "cuda":
            one_host = len(set(group.exchange(host_of(group)))) == 1
            mapped = (p2p if one_host else nvshmem).Segments(group, nbytes, device)
            self._keep = mapped  # as long as this memory
            self.local, self.segments, self.addresses = mapped.local, [], mapped.addresses
            # A peer's object has the address, as NVSHMEM names it, that this rank's own object has.
            self.remote = [(rank, self.local.data_ptr()) for rank in range(group.size)]
        else:
            raise PlanError(f"there is no symmetric memory on {device} across processes; use cpu or cuda")
        for rank, segment in enumerate(self.segments if device.type == "cpu" else ()):
            ranges.add(segment, f"symmetric memory of rank {rank}")


def _map_all(group: Group, nbytes: int) -> list[torch.Tensor]:
    fd = os.memfd_create("triton_ext", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        offers = group.exchange((_host(), os.getpid(), fd, nbytes))
        segments, problem = [], None
        for rank, (host, pid, peer_fd, peer_bytes) in enumerate(offers):
            try:
                if host != _host():
                    raise PlanError(f"rank {rank} is on another host; ranks of a plan share one host for now")
                segments.append(_map(fd if rank == group.rank else f"/proc/{pid}/fd/{peer_fd}", peer_bytes))
            except (OSError, ValueError, PlanError) as error:
                problem = f"rank {group.rank} cannot map the memory of rank {rank} ({peer_bytes} bytes): {error}"
                break
        problems = [text for text in group.exchange(problem) if text]  # all have mapped: the fd may go
    finally:
        os.close(fd)
    if problems:
        raise PlanError("; ".join(problems))
    return segments


def _map(path: str | int, nbytes: int) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if isinstance(path, str) else os.dup(path)
    try:
        # Populated now, so that no kernel pays for page faults.
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def host_of(group: Group) -> str:
    """What ranks that can map each other's memory have in common."""
    if isinstance(group, ThreadRanks):
        return f"virtual host {group.host}"
    return _host()


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
