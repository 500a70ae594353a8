"""Memory that checked kernels may access besides the tensors they are given, and which of it nobody has written."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch

_lock = threading.Lock()
_addressable: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
_unwritten: dict[int, _Unwritten] = {}


@dataclass(frozen=True)
class _Unwritten:
    tensor: weakref.ref[torch.Tensor]
    shadow: torch.Tensor
    """One byte for each of the tensor's storage: 0 where nothing has been written."""
    version: int


def add(tensor: torch.Tensor, name: str) -> None:
    """Kernels may access the storage of `tensor` as long as the tensor lives; messages call it `name`."""
    with _lock:
        _addressable[id(tensor)] = weakref.ref(tensor), name


def addressable() -> list[tuple[torch.Tensor, str]]:
    """The tensors that `add` was called with."""
    with _lock:
        found = [(key, reference(), name) for key, (reference, name) in _addressable.items()]
        for key, tensor, _ in found:
            if tensor is None:
                del _addressable[key]
    return [(tensor, name) for _, tensor, name in found if tensor is not None]


def add_unwritten(tensor: torch.Tensor) -> None:
    """Nothing of what `tensor` shows has been written yet. Kept as long as the tensor lives."""
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    with _lock:
        shadow = _shadow_of(storage)
        if shadow is None:
            shadow = torch.ones(storage.nbytes(), dtype=torch.uint8)
        strides = (*(stride * size for stride in tensor.stride()), 1)
        shadow.as_strided((*tensor.shape, size), strides, tensor.storage_offset() * size).zero_()
        _unwritten[storage.data_ptr()] = _Unwritten(weakref.ref(tensor), shadow, tensor._version)


def shadow_of(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """Which bytes of a storage have been written, where that is kept.

    No longer once torch has written to the tensor, which tells that it did, but not where.
    """
    with _lock:
        return _shadow_of(storage)


def _shadow_of(storage: torch.UntypedStorage) -> torch.Tensor | None:
    entry = _unwritten.get(storage.data_ptr())
    if entry is None:
        return None
    tensor = entry.tensor()
    if tensor is None or tensor._version != entry.version or entry.shadow.numel() != storage.nbytes():
        del _unwritten[storage.data_ptr()]
        return None
    return entry.shadow
