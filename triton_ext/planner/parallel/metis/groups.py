"""How Metis divides devices among pipeline stages: vectors of group sizes (USENIX ATC 2024).

Sizes are powers of two; where the stages divide the devices evenly, the even share is one too, so that any number of
devices has plans (for a power of two this adds nothing). Two rules prune: sizes below `min_group_scale_variance` times
the even share, and orders of a vector's entries beyond what permuting `max_permute_len` blocks gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Block = tuple[int, ...]


@dataclass(frozen=True)
class Groups:
    """The vectors of one number of stages.

    sizes: what the first rule leaves. ordered: how many vectors of these sizes there are, in any order, before the
    second rule. pruned_by_size: how many the first rule left out.
    """

    devices: int
    stages: int
    sizes: tuple[int, ...]
    max_permute_len: int

    @cached_property
    def ordered(self) -> int:
        return count_ordered(self.devices, self.stages, self.sizes)

    @cached_property
    def pruned_by_size(self) -> int:
        return count_ordered(self.devices, self.stages, all_sizes(self.devices, self.stages)) - self.ordered

    def arrangements(self) -> Iterator[tuple[int, ...]]:
        """Vectors from every order of blocks; a vector comes as often as different blocks give it."""
        for parts in compositions(self.devices, self.stages, self.sizes):
            for blocks in orders(fused(parts, self.max_permute_len)):
                yield tuple(size for block in blocks for size in block)

    def vectors(self) -> Iterator[tuple[int, ...]]:
        """Every vector, once."""
        for parts in compositions(self.devices, self.stages, self.sizes):
            blocks = fused(parts, self.max_permute_len)
            unfused = len(blocks) == len(parts)
            seen: set[tuple[int, ...]] = set()
            for order in orders(blocks):
                vector = tuple(size for block in order for size in block)
                if unfused:
                    yield vector
                elif vector not in seen:
                    seen.add(vector)
                    yield vector


def groups(devices: int, stages: int, min_group_scale_variance: float, max_permute_len: int) -> Groups:
    least = min_group_scale_variance * max(devices // stages, stages // devices)
    kept = tuple(size for size in all_sizes(devices, stages) if size >= least)
    return Groups(devices, stages, kept, max_permute_len)


def all_sizes(devices: int, stages: int) -> tuple[int, ...]:
    """The sizes that a group may have, ascending."""
    found = {1 << exponent for exponent in range(devices.bit_length())}
    if devices % stages == 0:
        found.add(devices // stages)
    return tuple(sorted(found))


def compositions(total: int, parts: int, allowed: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Non-decreasing tuples of `parts` allowed numbers (ascending) that sum to `total`, in lexicographic order."""
    if not allowed or parts * allowed[0] > total or parts * allowed[-1] < total:
        return
    if parts == 1:
        if total in allowed:
            yield (total,)
        return
    for index, first in enumerate(allowed):
        for rest in compositions(total - first, parts - 1, allowed[index:]):
            yield (first, *rest)


def count_ordered(total: int, parts: int, allowed: Sequence[int]) -> int:
    """Tuples of `parts` allowed numbers, in any order, that sum to `total`."""
    ways = [1] + [0] * total
    for _ in range(parts):
        ways = [sum(ways[value - size] for size in allowed if size <= value) for value in range(total + 1)]
    return ways[total]


def fused(parts: Sequence[int], limit: int) -> list[Block]:
    """The parts as at most `limit` blocks, where fusing neighbours of the smallest sum can achieve it.

    Each round fuses as many pairs as are too many, and at least half of the blocks that equal the least one.
    """
    blocks: list[Block] = [(part,) for part in parts]
    while len(blocks) > limit:
        smallest = min(map(sum, blocks))
        least = min(block for block in blocks if sum(block) == smallest)
        pairs = max(len(blocks) - limit, (blocks.count(least) + 1) // 2)
        after: list[Block] = []
        index = 0
        while index < len(blocks):
            pair = blocks[index : index + 2]
            if pairs and len(pair) == 2 and sum(pair[0]) == sum(pair[1]) == smallest:
                after.append(pair[0] + pair[1])
                pairs -= 1
                index += 2
            else:
                after.append(blocks[index])
                index += 1
        if len(after) == len(blocks):
            break
        blocks = after
    return blocks


def orders(blocks: Sequence[Block]) -> Iterator[tuple[Block, ...]]:
    """Every distinct order of the blocks, in lexicographic order: each is the next permutation of the last."""
    current = sorted(blocks)
    while True:
        yield tuple(current)
        pivot = len(current) - 2
        while pivot >= 0 and current[pivot] >= current[pivot + 1]:
            pivot -= 1
        if pivot < 0:
            return
        swap = len(current) - 1
        while current[swap] <= current[pivot]:
            swap -= 1
        current[pivot], current[swap] = current[swap], current[pivot]
        current[pivot + 1 :] = current[:pivot:-1]
