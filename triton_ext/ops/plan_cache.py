"""The plans of functional operators: made at the first call with a shape, dtype and group, and kept."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import choices, groups
from ..runtime.plans import Plan

_CAPACITY = 32  # plans per process: the least recently used one goes, on all ranks at the same call

_plans: OrderedDict[tuple[Any, ...], tuple[Any, Plan]] = OrderedDict()
_lock = threading.Lock()


def plan_for(
    make: Callable[..., Plan], group_name: str, *arguments: Any, computation: Callable[[], object], **options: Any
) -> Plan:
    """make(*arguments, group=…, **options), or the plan that an earlier call with the same arguments made.

    computation: without its collective; timed where the planner has measurements to compare with. Collective where the
    plan is made, so all ranks of a group must call in the same order.
    """
    group = groups.named(group_name)
    key = (make, group_name, arguments, tuple(sorted(options.items())))
    with _lock:
        found = _plans.get(key)
        if found is not None and found[0] is group and not found[1].is_freed:
            _plans.move_to_end(key)
            return found[1]
    compute_s = _seconds(computation) if choices.is_library_known() else None
    # Waits for other ranks, which may be threads of this process.
    plan = make(*arguments, compute_s=compute_s, group=group, **options)
    with _lock:
        _plans[key] = group, plan
        while len(_plans) > _CAPACITY:
            _plans.popitem(last=False)[1][1].free()
    return plan


def _seconds(computation: Callable[[], object]) -> float:
    """What it takes, the second time."""
    for _ in range(2):
        _synchronize()
        start = time.perf_counter()
        computation()
        _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
