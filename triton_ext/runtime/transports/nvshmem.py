"""GPUs of several hosts: NVSHMEM's symmetric heap, and the kernels that call NVSHMEM.

Needs the packages nvshmem4py-cu12 (or -cu13) and nvidia-nvshmem-cu12 (-cu13). NVSHMEM is initialised once per process
with all ranks of the job, from the torch process group: a rank's processing element (PE) is its global rank.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from ...errors import PlanError
from ...passes import nvshmem as device_side
from ..groups import Group, raise_together


class Heap:
    """NVSHMEM in this process. Memory is given back when all ranks have released it, since that is collective."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """Collective over all ranks of the job. Raises PlanError, on every rank, where one cannot join."""
        problem, uid = None, None
        try:
            import nvshmem.core as core
            from cuda.core import Device

            uid = core.get_unique_id(empty=group.rank != 0)
        except (ImportError, RuntimeError, OSError) as error:
            problem = (
                f"rank {group.rank} cannot load NVSHMEM ({error}); install nvshmem4py and nvidia-nvshmem for its CUDA"
            )
        raise_together(group, problem)
        uid = group.exchange(uid)[0]
        self._core = core
        gpu = Device(device.index)
        gpu.set_current()
        core.init(device=gpu, uid=uid, rank=group.rank, nranks=group.size, initializer_method="uid")
        self._group = group
        self._live: dict[int, torch.Tensor] = {}
        self._released: set[int] = set()
        self._number = 0
        self._lock = threading.Lock()
        _initialise_modules()

    def allocate(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """A number and uint8[nbytes], zeroed, at the same place of every rank's heap. Collective over all ranks."""
        with self._lock:
            self._give_back(set.intersection(*self._group.exchange(set(self._released))))
            tensor = self._core.tensor((nbytes,), dtype=torch.uint8)
            tensor.zero_()
            if tensor.device.type == "cuda":
                torch.cuda.synchronize(tensor.device)
            self._number += 1
            number = self._number
            self._live[number] = tensor
            self._group.exchange(None)  # nobody stores into a segment that is yet to be zeroed
        return number, tensor

    def address_at(self, tensor: torch.Tensor, rank: int) -> int | None:
        """Where this rank's kernels can load and store the same tensor of another rank; None if they cannot."""
        from nvshmem import bindings

        return bindings.ptr(tensor.data_ptr(), rank) or None

    def release(self, number: int) -> None:
        """This rank uses that memory no more. Not collective."""
        self._released.add(number)

    def close(self) -> None:
        """Give everything back and leave. Collective over all ranks."""
        self._group.exchange(None)
        self._give_back(set(self._live))
        self._core.finalize()

    def _give_back(self, numbers: set[int]) -> None:
        for number in sorted(numbers):  # the same order on all ranks: freeing is collective
            self._core.free_tensor(self._live.pop(number))
        self._released -= numbers


_heap: Heap | None = None
_heap_lock = threading.Lock()  # for virtual ranks, which share it


def heap(world: Group, device: torch.device) -> Heap:
    """The heap of this process. The first call is collective over `world`, all ranks of the job."""
    global _heap
    with _heap_lock:
        if _heap is None:
            _heap = Heap(world, device)
        return _heap


def close() -> None:
    """Leave NVSHMEM, if this process has joined. Collective."""
    global _heap
    if _heap is not None:
        _heap.close()
        _heap = None


class Alone:
    """The group of a job with one process: its virtual ranks share one processing element."""

    rank, size, name = 0, 1, "alone"

    def exchange(self, value: Any) -> list[Any]:
        return [value]

    def global_rank(self, rank: int) -> int:
        return rank


class Segment:
    """Memory of this rank on the symmetric heap, zeroed, as long as this object. Collective over the heap's ranks."""

    local: torch.Tensor  #: uint8[nbytes]

    def __init__(self, heap: Heap, nbytes: int) -> None:
        self._heap = heap
        self._number, self.local = heap.allocate(nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self._heap.release(self._number)


class Segments(Segment):
    """This rank's segment on the symmetric heap, and where each rank's segment is, as seen from here.

    addresses: of segments that this rank's kernels can store into (own host, NVLink); None for the others, which only
    NVSHMEM's calls reach: they take this rank's own address of an object, and the peer's PE.
    """

    addresses: list[int | None]

    def __init__(self, group: Group, nbytes: int, device: torch.device) -> None:
        """Collective over all ranks of the job: `group` has to be all of them. Raises PlanError otherwise."""
        everybody = [group.global_rank(rank) for rank in range(group.size)]
        if everybody != list(range(torch.distributed.get_world_size())):
            raise PlanError(
                f"a plan over ranks {everybody}: on GPUs of several hosts a plan takes all ranks of the job, because "
                "NVSHMEM allocates on all of them at once; use the default group"
            )
        super().__init__(heap(group, device), nbytes)
        self.addresses = [
            self.local.data_ptr() if rank == group.rank else self._heap.address_at(self.local, rank)
            for rank in range(group.size)
        ]


def _initialise_modules() -> None:
    """From now on, give NVSHMEM's device state to every kernel that calls it, when Triton has loaded the kernel."""
    if _initialise_module not in knobs.runtime.kernel_load_end_hook.calls:
        knobs.runtime.kernel_load_end_hook.add(_initialise_module)


def _initialise_module(module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str) -> None:
    """Triton's hook behind the loading of a kernel. `module` is the CUmodule."""
    [metadata] = (Path(path) for file, path in metadata_group.items() if file.endswith(".json"))
    if device_side.LIBRARY in dict(json.loads(metadata.read_text()).get("extern_libs", ())):
        from nvshmem import bindings

        bindings.cumodule_init(int(module))
