"""What commands print: names as they are."""

import io

import pytest
from rich.table import Table

from triton_ext import terminal


@pytest.mark.parametrize("name", ["[/oops]", "sweep[a]", "[bold]x[/]", ":smile:", "a\\", "[link=x]"])
def test_names_are_printed_as_they_are(name: str) -> None:
    """In lines, titles, headings and cells."""
    console = terminal.console(200)
    console.file = io.StringIO()
    table = Table(title=f"of {name}")
    table.add_column(f"in {name}")
    table.add_row(f"is {name}")
    console.print(table)
    console.print(f"and {name}", style="dim")
    text = console.file.getvalue()
    assert all(f"{word} {name}" in text for word in ("of", "in", "is", "and"))
    assert console.width >= 200
