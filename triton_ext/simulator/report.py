"""What a simulation found, in the author's terms."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xdsl.ir import Operation

from ..ir import call_chain


@dataclass(frozen=True)
class Finding:
    """A fault. kind: "race", "stale read", "unwritten", "double write", "out of bounds", "misaligned", "deadlock",
    "livelock", "wrong result", "failure" (that the kernel recorded) or "assertion".

    site: where in the code. trace: the last events that have to do with it. seed: what repeats it.
    """

    kind: str
    message: str
    site: str
    seed: int
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"\n  at {self.site}" if self.site else ""
        trace = "".join(f"\n    {event}" for event in self.trace)
        return f"{self.kind} (seed {self.seed}): {self.message}{where}" + (f"\n  before that:{trace}" if trace else "")


@dataclass
class Report:
    """Of simulations with several seeds. steps: shared accesses that were scheduled, in all of them."""

    kernel: str
    world: int
    runs: int
    seeds: int = 0
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        about = f"{self.kernel}, world {self.world}: {self.seeds} seeds, {self.runs} runs each, {self.steps} steps"
        if not self.findings:
            return f"{about}: nothing found"
        found = "\n".join(map(str, self.findings))
        return f"{about}: {len(self.findings)} of {self.seeds} seeds found a fault\n{found}"


def place_of(op: Operation) -> str:
    """Where an operation comes from, outwards: "arrive (protocol.py:223), copy_out (collectives.py:22)"."""
    chain = call_chain(op)
    return ", ".join(f"{function_at(file, line)} ({Path(file).name}:{line})" for file, line in chain) or op.name


def functions_of(op: Operation) -> Sequence[str]:
    """The functions that an operation comes from, the innermost first."""
    return [function_at(file, line) for file, line in call_chain(op)]


def function_at(file: str, line: int) -> str:
    """The function of a Python file that a line is in."""
    return next((name for name, start, end in _functions(file) if start <= line <= end), "?")


@functools.cache
def _functions(file: str) -> list[tuple[str, int, int]]:
    """The functions of a file, inner ones first: name, first and last line."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    found = [
        (node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    return sorted(found, key=lambda entry: entry[2] - entry[1])
