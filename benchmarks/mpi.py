"""MPI with the calls of torch.distributed that the unfused operators make, for CPU tensors."""

from __future__ import annotations

from typing import Any

import torch


class MPI:
    """The world of `mpiexec`. Raises ImportError without mpi4py, RuntimeError outside mpiexec."""

    def __init__(self) -> None:
        from mpi4py import MPI as mpi

        self._mpi = mpi
        self._comm = mpi.COMM_WORLD

    def get_rank(self) -> int:
        return int(self._comm.Get_rank())

    def get_world_size(self) -> int:
        return int(self._comm.Get_size())

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
    ) -> None:
        row = input[0].numel() * input.itemsize if len(input) else 0
        self._comm.Alltoallv(self._rows(input, input_sizes, row), self._rows(output, output_sizes, row))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, [tensor.numpy(), self._mpi.FLOAT])

    def _rows(self, tensor: torch.Tensor, sizes: list[int], row_bytes: int) -> list[Any]:
        counts = [size * row_bytes for size in sizes]
        starts = [sum(counts[:rank]) for rank in range(len(counts))]
        return [tensor.view(torch.uint8).numpy(), counts, starts, self._mpi.BYTE]
