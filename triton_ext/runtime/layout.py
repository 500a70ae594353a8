"""Where the elements of a collective go: pure arithmetic on shapes, the same on every rank.

Sharding follows torch.chunk: along a dimension of `size`, rank r owns the indices from r * ceil(size / world) on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """What one source rank sends to one destination rank. All numbers count elements.

    origin: offset of logical index 0 in the destination's result (it may lie outside). strides: of that result.
    stage_origin, stage_strides: the same for partial values in the destination's staging area.
    expected: elements that arrive in one run; expected_reduced: of these, after the source has reduced them.
    """

    origin: int = 0
    strides: Shape = ()
    stage_origin: int = 0
    stage_strides: Shape = ()
    expected: int = 0
    expected_reduced: int = 0


@dataclass(frozen=True)
class Layout:
    """A collective over `world` ranks.

    shapes: of the tensor that each rank computes. result_shapes: of what each rank has at the end.
    stage_elements: size of each rank's staging area. shard: indices per owner along split_dim.
    destinations: for collectives that do not split, the range of ranks that each rank sends to.
    routes: routes[source][destination]. slices: messages to a peer on another host, None for as many as suit the
    transport.
    """

    shapes: list[Shape]
    result_shapes: list[Shape]
    shard: int
    destinations: list[tuple[int, int]]
    routes: list[list[Route]]
    stage_elements: int = 0
    slices: int | None = None

    @property
    def world(self) -> int:
        return len(self.shapes)

    def alignment(self, elements: int, split_dim: int) -> int:
        """`elements` if every row of every buffer starts at a multiple of it, else 1."""
        numbers = [shape[-1] for shape in (*self.shapes, *self.result_shapes)]
        if split_dim == len(self.shapes[0]) - 1:
            numbers.append(self.shard)
        for route in (route for routes in self.routes for route in routes):
            numbers += [route.origin, route.stage_origin, *route.strides[:-1], *route.stage_strides[:-1]]
        return elements if all(number % elements == 0 for number in numbers) else 1


def strides_of(shape: Shape) -> Shape:
    """Of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def shard_of(size: int, world: int) -> int:
    """Indices per owner; at least 1, so that it can divide."""
    return max(1, -(-size // world))


def owned(size: int, world: int, rank: int) -> tuple[int, int]:
    """The indices [start, end) that a rank owns along a dimension."""
    shard = shard_of(size, world)
    return min(rank * shard, size), min((rank + 1) * shard, size)


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def all_to_all(shapes: list[Shape], split_dim: int, concat_dim: int) -> Layout:
    """Each rank's tensor is split along split_dim; what a rank gets is concatenated along concat_dim.

    Sizes along concat_dim may differ among ranks, unless it is split_dim.
    """
    world = len(shapes)
    size = shapes[0][split_dim]
    parts = [owned(size, world, rank) for rank in range(world)]
    result_shapes, routes = [], [[Route()] * world for _ in range(world)]
    for destination, (start, end) in enumerate(parts):
        pieces = [_with(shape, split_dim, end - start) for shape in shapes]
        result = _with(pieces[0], concat_dim, sum(piece[concat_dim] for piece in pieces))
        strides = strides_of(result)
        offset = 0
        for source, piece in enumerate(pieces):
            origin = offset * strides[concat_dim] - start * strides[split_dim]
            routes[source][destination] = Route(origin, strides, expected=prod(piece))
            offset += piece[concat_dim]
        result_shapes.append(result)
    return Layout(shapes, result_shapes, shard_of(size, world), [(0, 0)] * world, routes)


def _reduction(shapes: list[Shape], split_dim: int, to_all: bool) -> Layout:
    world, shape = len(shapes), shapes[0]
    size = shape[split_dim]
    parts = [owned(size, world, rank) for rank in range(world)]
    stage = _with(shape, split_dim, shard_of(size, world))
    stage_strides = strides_of(stage)
    result_shapes = [shape if to_all else _with(shape, split_dim, end - start) for start, end in parts]
    lengths = [prod(_with(shape, split_dim, end - start)) for start, end in parts]
    routes = [
        [
            Route(
                0 if to_all else -parts[destination][0] * strides_of(result_shapes[destination])[split_dim],
                strides_of(result_shapes[destination]),
                source * prod(stage) - parts[destination][0] * stage_strides[split_dim],
                stage_strides,
                lengths[destination] if source != destination else 0,
                lengths[source] if to_all else 0,
            )
            for destination in range(world)
        ]
        for source in range(world)
    ]
    return Layout(
        shapes, result_shapes, shard_of(size, world), [(0, 0)] * world, routes, stage_elements=world * prod(stage)
    )


def reduce_scatter(shapes: list[Shape], split_dim: int) -> Layout:
    """The sum of all ranks' tensors; each rank gets its part along split_dim."""
    return _reduction(shapes, split_dim, to_all=False)


def all_reduce(shapes: list[Shape], split_dim: int) -> Layout:
    """The sum of all ranks' tensors, on every rank: owners along split_dim reduce, then send to all (two-shot)."""
    return _reduction(shapes, split_dim, to_all=True)


def all_reduce_one_shot(shapes: list[Shape]) -> Layout:
    """The sum of all ranks' tensors, on every rank: all send all they have to all, who reduce it themselves."""
    world, shape = len(shapes), shapes[0]
    strides, size = strides_of(shape), prod(shape)
    ranks = range(world)
    routes = [
        [Route(0, strides, source * size, strides, 0 if source == destination else size) for destination in ranks]
        for source in ranks
    ]
    return Layout(shapes, [shape] * world, 1, [(0, world)] * world, routes, stage_elements=world * size)


def all_gather(shapes: list[Shape], concat_dim: int) -> Layout:
    """All ranks' tensors, concatenated along concat_dim, where their sizes may differ, on every rank."""
    world = len(shapes)
    result = _with(shapes[0], concat_dim, sum(shape[concat_dim] for shape in shapes))
    strides = strides_of(result)
    routes, offset = [], 0
    for shape in shapes:
        routes.append([Route(offset * strides[concat_dim], strides, expected=prod(shape))] * world)
        offset += shape[concat_dim]
    return Layout(shapes, [result] * world, 1, [(0, world)] * world, routes)


def broadcast(shapes: list[Shape], root: int) -> Layout:
    """The root's tensor, on every rank."""
    world, shape = len(shapes), shapes[0]
    routes = [
        [Route(0, strides_of(shape), expected=prod(shape) if source == root else 0)] * world for source in range(world)
    ]
    destinations = [(0, world) if rank == root else (0, 0) for rank in range(world)]
    return Layout(shapes, [shape] * world, 1, destinations, routes)


def put(shapes: list[Shape], destinations: list[int | None]) -> Layout:
    """Each rank's tensor goes to one rank, or to none. No rank gets more than one tensor."""
    world, shape = len(shapes), shapes[0]
    routes = [
        [
            Route(0, strides_of(shape), expected=prod(shape) if destinations[source] == destination else 0)
            for destination in range(world)
        ]
        for source in range(world)
    ]
    ranges = [(0, 0) if rank is None else (rank, rank + 1) for rank in destinations]
    return Layout(shapes, [shape] * world, 1, ranges, routes)
