"""What pydantic finds wrong in a file, in the words of who wrote the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def describe(detail: ErrorDetails, what: str) -> str:
    """One error: the field, as in nodes[0].fabric, its value, and what it should be. `what` names the kind of file."""
    field = ""
    for part in detail["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    match detail["type"]:
        case "missing":
            return f"{field}: missing; give it"
        case "extra_forbidden":
            return f"{field}: no such field; the fields of a {what} are in docs/planner.md"
        case _:
            return f"{field or 'the file'}: {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
