"""Reads the text of Triton IR into an xDSL module that keeps the author's source locations."""

from __future__ import annotations

import re

from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, CallSiteLoc, FileLineColLoc, FusedLoc, ModuleOp, NameLoc
from xdsl.dialects.cf import Cf
from xdsl.dialects.ub import UB
from xdsl.ir import Attribute, Operation
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException

from triton_ext.errors import CompileError
from triton_ext.ir.dialect import ARITH, GPU, LLVM, MATH, SCF, TRITON, TRITON_GPU

_ALIAS = re.compile(r"^#\w+ = loc\(.*\)$\n?", re.MULTILINE)
_FILE_LOCATION = re.compile(r'"([^"]*)":(\d+):\d+')


def read_module(text: str) -> ModuleOp:
    """Parse `text`, as `str(module)` prints it for Triton 3.6 to 3.9 at the end of stage "ttir".

    Raises CompileError, naming the operation and the author's line, for what the dialect does not know.
    """
    context = Context()
    for dialect in (Builtin, ARITH, MATH, SCF, Cf, UB, TRITON, TRITON_GPU, GPU, LLVM):
        context.load_dialect(dialect)
    # Triton prints an alias after its uses, except the first; a reader in one pass needs it before them.
    aliases = "".join(_ALIAS.findall(text))
    body = _ALIAS.sub("", text)
    try:
        return Parser(context, aliases + body, name="<ttir>").parse_module()
    except (ParseError, VerifyException) as error:
        raise _unreadable(error, aliases, body) from error


def _unreadable(error: Exception, aliases: str, body: str) -> CompileError:
    if not isinstance(error, ParseError):
        return CompileError(f"cannot read this Triton IR: {error}")
    span = error.span
    whole = str(span.input.content)
    line_end = whole.find("\n", span.end)
    line = whole[whole.rfind("\n", 0, span.start) + 1 : line_end if line_end >= 0 else len(whole)]
    name = re.search(r"(?:^|= )\"?([a-z_]+\.[\w.]+)", line.strip())
    where = ""
    for alias in re.findall(r"loc\((#\w+)\)\s*$", line):
        definition = alias
        while match := re.search(rf"^{re.escape(definition)} = loc\((.*)\)$", aliases, re.MULTILINE):
            if found := _FILE_LOCATION.search(match[1]):
                where = f"{found[1]}:{found[2]}: "
                break
            inner = re.search(r"#loc\d*", match[1])
            if inner is None:
                break
            definition = inner[0]
    what = f"operation {name[1]}" if name else "this Triton IR"
    return CompileError(f"{where}cannot read {what}: {error.msg}\n  {line.strip()}")


def source_line(op: Operation) -> str:
    """`file:line` of the author's code that `op` came from, or its name where the location is unknown."""
    location = op.location
    found = _file_location(location) if location is not None else None
    return f"{found.filename.data}:{found.line.data}" if found else op.name


def _file_location(location: Attribute) -> FileLineColLoc | None:
    """The outermost file position of a location: the kernel's line, not a library's that it calls."""
    match location:
        case FileLineColLoc():
            return location
        case CallSiteLoc():
            return _file_location(location.caller) or _file_location(location.callee)
        case NameLoc():
            return _file_location(location.location)
        case FusedLoc():
            return next((found for part in location.locations if (found := _file_location(part))), None)  # type: ignore[attr-defined]
        case _:
            return None


def call_chain(op: Operation) -> list[tuple[str, int]]:
    """(file, line) of every call that led to `op`, the innermost function's own line first."""
    return _chain(op.location) if op.location is not None else []


def _chain(location: Attribute) -> list[tuple[str, int]]:
    match location:
        case FileLineColLoc():
            return [(location.filename.data, location.line.data)]
        case CallSiteLoc():
            return [*_chain(location.callee), *_chain(location.caller)]
        case NameLoc():
            return _chain(location.location)
        case FusedLoc():
            return next((found for part in location.locations if (found := _chain(part))), [])  # type: ignore[attr-defined]
        case _:
            return []
