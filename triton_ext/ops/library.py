"""The collectives of torch.distributed over one group, for the unfused path of an operator."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..runtime import groups


class Library:
    """As torch.distributed itself, but for the group with this name."""

    def __init__(self, group_name: str) -> None:
        group = groups.named(group_name)
        assert not isinstance(group, groups.ThreadRanks), "virtual ranks have no library"
        self._group = group

    def get_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def all_to_all_single(self, result: torch.Tensor, sent: torch.Tensor, gets: list[int], gives: list[int]) -> None:
        dist.all_to_all_single(result, sent, gets, gives, group=self._group)
