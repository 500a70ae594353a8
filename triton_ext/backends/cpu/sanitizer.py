"""The driver's side of checked kernels: the ranges of a launch, and the error that its report becomes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import MemoryAccessError
from . import ranges
from .codegen.checks import NO_PROGRAM, Fault, Site, Word


class _Range(NamedTuple):
    begin: int
    end: int
    name: str
    shadow: torch.Tensor | None

    def distance(self, address: int) -> int:
        return max(self.begin - address, address - self.end + 1, 0)

    def place(self, address: int) -> str:
        if address < self.begin:
            return f"{_bytes(self.begin - address)} before the start of {self.name}"
        if address >= self.end:
            return f"{_bytes(address - self.end)} behind the end of {self.name}"
        return f"at byte {address - self.begin} of {self.end - self.begin} of {self.name}"


class Sanitizer:
    """Of one compiled kernel."""

    def __init__(self, kernel: str, names: Sequence[str], signature: Sequence[Any], sites: Sequence[Site]) -> None:
        self._kernel, self._names, self._signature, self._sites = kernel, names, signature, sites

    def launch(self, args: Sequence[Any], grid: tuple[int, int, int]) -> Launch:
        found: dict[int, _Range] = {}
        for name, argument in _pointers(self._signature, args, self._names):
            if (each := _range_of(argument, f"argument {name}")) is not None:
                found.setdefault(each.begin, each)
        for tensor, name in ranges.addressable():
            if (each := _range_of(tensor, name)) is not None:
                found.setdefault(each.begin, each)
        return Launch(self._kernel, self._sites, list(found.values()), grid)


class Launch:
    """One launch: make it, pass `packed` behind the arguments, run the grid, call `check`."""

    def __init__(self, kernel: str, sites: Sequence[Site], found: Sequence[_Range], grid: tuple[int, int, int]) -> None:
        self._kernel, self._sites, self._ranges = kernel, sites, found
        self._table = np.zeros(Word.RANGES + 3 * len(found), dtype=np.uint64)
        self._table[Word.PROGRAM] = NO_PROGRAM
        self._table[Word.GRID_X], self._table[Word.GRID_Y] = grid[:2]
        self._table[Word.COUNT] = len(found)
        for i, each in enumerate(found):
            shadow = 0 if each.shadow is None else each.shadow.data_ptr()
            self._table[Word.RANGES + 3 * i :][:3] = each.begin, each.end, shadow
        self.packed = struct.pack("<Q", self._table.ctypes.data)

    def check(self) -> None:
        """Raise what went wrong."""
        word = [int(value) for value in self._table[: Word.RANGES]]
        if word[Word.PROGRAM] == NO_PROGRAM:
            return
        operation, line, shape, nbytes = self._sites[word[Word.SITE]]
        problem = (
            f"{operation} outside of every tensor"
            if word[Word.FAULT] == Fault.OUTSIDE
            else f"{operation} of memory that nobody has written"
        )
        element = f", element {_unravel(word[Word.ELEMENT], shape)} of a block of {tuple(shape)}" if shape else ""
        program = word[Word.X], word[Word.Y], word[Word.Z]
        raise MemoryAccessError(
            f"kernel {self._kernel}: {problem}, at {line}, program {program}{element}: its {_bytes(nbytes)} begin "
            f"{self._place(word[Word.ADDRESS])}"
        )

    def _place(self, address: int) -> str:
        if not self._ranges:
            return f"at {address:#x}, and the kernel was given no tensor"
        return min(self._ranges, key=lambda each: each.distance(address)).place(address)


def _pointers(signature: Sequence[Any], args: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for kind, argument, name in zip(signature, args, names, strict=True):
        if isinstance(kind, tuple):
            fields = [f"{name}.{field}" for field in getattr(kind, "_fields", range(len(kind)))]
            yield from _pointers(kind, argument, fields)
        elif kind.startswith("*"):
            yield name, argument


def _range_of(argument: Any, name: str) -> _Range | None:
    """None for an address: nothing tells how much memory lies there."""
    tensor = getattr(argument, "base", argument)  # triton.reinterpret wraps a tensor
    if not isinstance(tensor, torch.Tensor):
        return None
    storage = tensor.untyped_storage()
    begin, nbytes = storage.data_ptr(), storage.nbytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    within = "" if nbytes == prod(tensor.shape) * tensor.element_size() else f", in a storage of {_bytes(nbytes)}"
    text = f"{name} ({kind}, shape {tuple(tensor.shape)}{within})"
    return _Range(begin, begin + nbytes, text, ranges.shadow_of(storage))


def _unravel(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(number % size)
        number //= size
    return tuple(reversed(index))


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"
