"""The console that commands print to."""

from __future__ import annotations

from rich.console import Console


def console(least_width: int = 0, highlight: bool = True) -> Console:
    """Prints names as they are: [a] is no markup, and :a: no emoji. Narrower than least_width, tables would be cut."""
    return Console(width=max(Console().width, least_width), markup=False, emoji=False, highlight=highlight)
