"""The arrows between the package's rooms point down, as docs/architecture.md draws them."""

import ast
import re
from pathlib import Path

import triton_ext

PACKAGE = Path(triton_ext.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
LEVELS = {
    room: int(level) for level, room in re.findall(r"^\| (\d) \| `([a-z_.]+)` \|", PAGE.read_text(), flags=re.MULTILINE)
}


def room_of(names):
    """Of a dotted name inside the package; None for the package itself."""
    long, short = ".".join(names[:2]), ".".join(names[:1])
    return long if long in LEVELS else short or None


def imports(path):
    """Dotted names inside the package that a module imports, anywhere in it."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple((node.module or "").split("."))
            yield from (tuple(filter(None, (*base, alias.name))) for alias in node.names)
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            yield from (tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "triton_ext")


def test_every_room_is_on_the_page():
    found = {room_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert found - {"__init__", "__main__"} == set(LEVELS)


def test_arrows_point_down():
    arrows, up = set(), []
    for path in PACKAGE.rglob("*.py"):
        here = room_of(path.relative_to(PACKAGE).with_suffix("").parts)
        for names in imports(path):
            there = room_of(names)
            arrows.add((here, there))
            if here in LEVELS and there != here and there and LEVELS[there] >= LEVELS[here]:
                up.append(f"{path.relative_to(PACKAGE)} imports {'.'.join(names)}")
    assert not up
    assert ("ops", "runtime") in arrows and ("runtime", "planner") in arrows
