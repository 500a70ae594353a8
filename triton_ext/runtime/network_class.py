"""How the network is to treat a job's messages: its priority and its path class, the same on all of its ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..errors import JobError
from .groups import Group

MOST_PRIORITY = 63  # a DSCP has six bits
MOST_PATH_CLASS = 16383  # so many UDP source ports are there for RoCE: 0xC000 to 0xFFFF


@dataclass(frozen=True)
class NetworkClass:
    """None: not told, as the network likes. What `triton-ext priorities` prints for a job."""

    priority: int | None = None  # 0 goes first
    path_class: int | None = None  # which of the equal-cost paths the job's flows take


def agree(group: Group, priority: int | None, path_class: int | None) -> NetworkClass:
    """What every rank of the job was told, by argument or else by environment. Collective.

    Raises JobError, on every rank, for what is no such number on any of them, and if ranks were told different things.
    """
    mine = (
        os.environ.get("TRITON_EXT_PRIORITY") if priority is None else priority,
        os.environ.get("TRITON_EXT_PATH_CLASS") if path_class is None else path_class,
    )
    offers = group.exchange(mine)
    priorities = [_number("TRITON_EXT_PRIORITY", offer[0], MOST_PRIORITY, rank) for rank, offer in enumerate(offers)]
    classes = [_number("TRITON_EXT_PATH_CLASS", offer[1], MOST_PATH_CLASS, rank) for rank, offer in enumerate(offers)]
    for what, values in (("priority", priorities), ("path_class", classes)):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise JobError(
                    f"ranks disagree on the job's {what}: {values[0]} on rank 0 and {value} on rank {rank}; "
                    "tell all ranks the same (None: not told)"
                )
    return NetworkClass(priorities[0], classes[0])


def _number(variable: str, value: Any, most: int, rank: int) -> int | None:
    """A setting as a number; `variable` stands for the argument too."""
    if value is None or value == "":
        return None
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
        name = f"{variable}={value}" if isinstance(value, str) else f"{variable[11:].lower()}={value!r}"
        raise JobError(f"{name} on rank {rank}: give a whole number from 0 to {most}")
    return number
