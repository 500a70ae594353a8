"""Symmetric memory: one segment per rank, which every rank of the group can address."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ..backends.cpu import ranges
from ..errors import PlanError
from .groups import Group, ThreadRanks, raise_together
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
    """This rank's segment, zeroed, and where every rank's segment is, as seen from here.

    Between processes the segment is an anonymous file (memfd): it never has a name, so a crash leaves nothing
    behind, and it lives as long as some rank maps it. Between virtual ranks it is ordinary memory of the device.
    """

    local: torch.Tensor  #: uint8[nbytes]
    segments: list[torch.Tensor | None]  #: None, as in addresses, for a segment that loads and stores do not reach
    addresses: list[int | None]
    remote: list[tuple[int, int]]  #: how a transport names each segment: its processing element, and an address

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        """Collective. Raises PlanError where ranks cannot map each other's memory."""
        if isinstance(group, ThreadRanks):
            hosts = group.exchange(host_of(group))
            if len(set(hosts)) > 1 and device.type == "cuda":
                self._keep = nvshmem.Segment(nvshmem.heap(nvshmem.Alone(), device), nbytes)
                self.local = self._keep.local
            else:
                self.local = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            offers = group.exchange(self.local)
            own = hosts[group.rank]
            self.segments = [segment if host == own else None for host, segment in zip(hosts, offers, strict=True)]
            self.remote = [(0, segment.data_ptr()) for segment in offers]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        elif device.type == "cpu":
            self.local, self.segments = _map_all(group, nbytes)
            self.remote = [(rank, 0) for rank in range(group.size)]  # by the proxy, to which addresses mean nothing
        elif device.type == "cuda":
            one_host = len(set(group.exchange(host_of(group)))) == 1
            mapped = (p2p if one_host else nvshmem).Segments(group, nbytes, device)
            self.local, self.segments, self.addresses = mapped.local, [], mapped.addresses
            self._keep = mapped  # as long as this memory
            # A peer's object has the address, as NVSHMEM names it, that this rank's own object has.
            self.remote = [(rank, self.local.data_ptr()) for rank in range(group.size)]
            return
        else:
            raise PlanError(f"there is no symmetric memory on {device} across processes; use cpu or cuda")
        self.addresses = [None if segment is None else segment.data_ptr() for segment in self.segments]
        for rank, segment in enumerate(self.segments if device.type == "cpu" else ()):
            if segment is not None:
                ranges.add(segment, f"symmetric memory of rank {rank}")


def _map_all(group: Group, nbytes: int) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """This rank's segment, and those of the ranks of its host."""
    segments: list[torch.Tensor | None] = [None] * group.size
    fd, offer, problem = None, None, None
    try:
        try:
            fd = os.memfd_create("triton_ext", os.MFD_CLOEXEC)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            segments[group.rank] = _map(fd, nbytes)
            offer = (host_of(group), os.getpid(), fd, nbytes)
        except (OSError, ValueError) as error:
            problem = f"rank {group.rank} cannot allocate {nbytes} bytes: {error}"
        offers = group.exchange(offer)
        for rank, theirs in enumerate(offers):
            if offer is None or theirs is None or theirs[0] != offer[0] or rank == group.rank:
                continue
            _, pid, peer_fd, peer_bytes = theirs
            try:
                segments[rank] = _map(f"/proc/{pid}/fd/{peer_fd}", peer_bytes)
            except (OSError, ValueError) as error:
                problem = f"rank {group.rank} cannot map the memory of rank {rank} ({peer_bytes} bytes): {error}"
                break
        raise_together(group, problem)  # and all have mapped: the fd may go
    finally:
        if fd is not None:
            os.close(fd)
    local = segments[group.rank]
    assert local is not None
    return local, segments


def _map(path: str | int, nbytes: int) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if isinstance(path, str) else os.dup(path)
    try:
        # Populated now, so that no kernel pays for page faults.
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def host_of(group: Group) -> str:
    """What ranks that can map each other's memory have in common. Containers of one machine are hosts of their own, and
    so are ranks with different TRITON_EXT_HOST.
    """
    if isinstance(group, ThreadRanks):
        return f"virtual host {group.host}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([boot, *spaces, os.environ.get("TRITON_EXT_HOST", "")])
