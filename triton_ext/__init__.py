"""Triton kernels that communicate: collectives fused into the store of a kernel.

The kernel side is `triton_ext.language`; this module is the host's side. Names are resolved when they are used, so
that importing the package stays cheap.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "init": "runtime.process",
    "network_class": "runtime.process",
    "shutdown": "runtime.process",
    "Plan": "runtime.plans",
    "all_gather": "runtime.collectives",
    "all_reduce": "runtime.collectives",
    "all_to_all": "runtime.collectives",
    "broadcast": "runtime.collectives",
    "put": "runtime.collectives",
    "reduce_scatter": "runtime.collectives",
}
_MODULES = ("errors", "language", "ops", "testing")

__all__ = [*_NAMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
