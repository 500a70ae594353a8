"""GPUs of one host: memory that every rank of a group maps, from torch.distributed's symmetric memory (CUDA P2P)."""

from __future__ import annotations

from typing import Any, cast

import torch

from ..groups import Group, raise_together


class Segments:
    """This rank's segment, zeroed, and where each rank's segment is, as seen from here. Collective.

    addresses: of every rank's segment; each of them takes loads, stores and atomics of this rank's kernels.
    """

    local: torch.Tensor  #: uint8[nbytes]
    addresses: list[int]

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        """Raises PlanError, on every rank, where a rank cannot allocate or map."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        problem = None
        try:
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self.local = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter is a torch without CUDA
            problem = f"rank {group.rank} cannot allocate {nbytes} bytes on {device}: {error}"
        raise_together(group, problem)  # or the others would wait in rendezvous for a rank that has nothing to offer
        try:
            # The handle holds the peers' memory mapped.
            self._handle: Any = symmetric_memory.rendezvous(self.local, cast(Any, group.name))
            self.addresses = [int(address) for address in self._handle.buffer_ptrs]
            self.local.zero_()
            if self.local.device.type == "cuda":
                torch.cuda.synchronize(self.local.device)
        except RuntimeError as error:
            problem = f"rank {group.rank} cannot map the memory of its peers on {device}: {error}"
        raise_together(group, problem)  # and nobody stores into a segment that is yet to be zeroed
