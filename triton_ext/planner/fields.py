"""What pydantic finds wrong in a file, in the words of who wrote the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def describe(detail: ErrorDetails, what: str, page: str = "docs/planner.md") -> str:
    """One error: the field, as in nodes[0].fabric, its value, and what it should be. `page` tells of the fields."""
    field = ""
    for part in detail["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    match detail["type"]:
        case "missing":
            return f"{field}: missing; give it"
        case "extra_forbidden":
            return f"{field}: no such field; the fields of a {what} are in {page}"
        case _:
            return f"{field or 'the file'}: {detail['input']!r}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
