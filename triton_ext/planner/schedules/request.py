"""What is asked: a collective of a fused kernel, on some devices of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...errors import PlanningError
from .algorithms import NAMES
from .costs import NONE, Costs, not_negative
from .schedule import COLLECTIVES, PieceBytes

UNFUSED = "unfused"  # compute first, then the collective of a library
SCHEDULES = (*NAMES, UNFUSED)

#: In which order a rank computes its tiles. remote_first: what is for one peer after the other, its own last;
#: interleaved: the first slice for every peer, then the second, its own last; in_order: as they lie in the tensor.
ORDERS = ("remote_first", "interleaved", "in_order")

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
}  # fmt: skip


def _one_of(what: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise PlanningError(f"{what}: no {name!r}; there are {', '.join(names)}")


class Measurement(NamedTuple):
    """A collective alone, without the kernel that it is fused into, took standalone_s for a tensor of tensor_bytes on
    `world` ranks. slices: of the schedule that was measured; None stands for any number of them."""

    collective: str
    schedule: str
    world: int
    tensor_bytes: int
    standalone_s: float
    slices: int | None = None


@dataclass(frozen=True)
class Request:
    """A collective at the end of a kernel.

    tensor_bytes: of the tensor that each rank's kernel computes, all of it (of an all_to_all, what is for each of n
    ranks is the n-th part). tiles: that the tensor is computed in. tile_compute_s: the kernel's time
    without the collective, over its number of tiles. group: the cluster's devices, in the order of ranks.
    executable: the schedules that the runtime can run, and "unfused" if the caller may do without the fused kernel,
    which then computes for unfused_compute_s (None: as long as the fused one). slices, orders: what the runtime can
    do: into how many messages to one peer it cuts a transfer (chunks, of a tree and a chain), and ORDERS.
    root: of a broadcast. destinations: of a put, of each rank. barred: schedules that are not executable for another
    reason than that the runtime cannot run them, and the reasons. wire_dtype: of partial values on their way to be
    summed; None: as the tensor.

    Raises PlanningError for numbers and names that cannot be.
    """

    collective: str
    tensor_bytes: int
    dtype: str
    tiles: int
    tile_compute_s: float
    group: tuple[int, ...]
    executable: frozenset[str] = frozenset(SCHEDULES)
    slices: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    orders: tuple[str, ...] = ORDERS
    root: int = 0
    destinations: tuple[int | None, ...] = ()
    unfused_compute_s: float | None = None
    costs: Costs = NONE
    barred: tuple[tuple[str, str], ...] = ()
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        _one_of("collective", self.collective, COLLECTIVES)
        for dtype in (self.dtype, self.wire_dtype or self.dtype):
            _one_of("dtype", dtype, tuple(DTYPE_BYTES))
        for name in self.executable:
            _one_of("executable", name, SCHEDULES)
        for name, _ in self.barred:
            _one_of("barred", name, SCHEDULES)
        for order in self.orders:
            _one_of("orders", order, ORDERS)
        if self.tensor_bytes < 0 or self.tensor_bytes % self.item_bytes:
            raise PlanningError(
                f"tensor_bytes is {self.tensor_bytes}; give whole elements of {self.dtype}, of {self.item_bytes} B"
            )
        if self.tiles < 1:
            raise PlanningError(f"tiles is {self.tiles}; a kernel has at least one")
        not_negative("tile_compute_s", self.tile_compute_s)
        if self.unfused_compute_s is not None:
            not_negative("unfused_compute_s", self.unfused_compute_s)
        if not self.slices or min(self.slices) < 1 or not self.orders or not self.group:
            raise PlanningError("slices (1 or more), orders and group: give at least one of each")
        if not 0 <= self.root < self.world:
            raise PlanningError(f"root is {self.root}, which is not a rank of {self.world}")
        if len(self.destinations) != (self.world if self.collective == "put" else 0):
            raise PlanningError(
                f"{len(self.destinations)} destinations for a {self.collective} of {self.world} ranks; a put has one "
                "for each rank, others have none"
            )
        there = [destination for destination in self.destinations if destination is not None]
        if len(set(there)) < len(there) or not all(0 <= destination < self.world for destination in there):
            raise PlanningError(f"destinations {self.destinations}: give each rank of {self.world} at most once")

    @property
    def world(self) -> int:
        return len(self.group)

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def compute_s(self) -> float:
        return self.tiles * self.tile_compute_s

    def piece(self, parts: int) -> PieceBytes:
        """The longest part of the tensor cut into `parts`, as torch.chunk does."""
        items = -(-(self.tensor_bytes // self.item_bytes) // parts)
        return PieceBytes(items * self.item_bytes, items * DTYPE_BYTES[self.wire_dtype or self.dtype])
