"""How a launch passes arguments to a kernel: one 8-byte slot per run-time argument, in the signature's order."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from ...errors import LaunchError

# Struct codes that fill a slot, by Triton's name of the type.
_CODES = {
    "fp64": "d",
    "fp32": "f4x",
    "fp16": "e6x",
    "u64": "Q",
    **{f"i{bits}": "q" for bits in (1, 8, 16, 32, 64)},
    **{f"u{bits}": "q" for bits in (1, 8, 16, 32)},
}


def packer(names: list[str], signature: list[Any]) -> Callable[[tuple[Any, ...]], bytes]:
    """A function that packs a kernel's arguments.

    names: of the arguments, for messages. signature: their types as Triton writes them; a tuple for a tuple, and
    "constexpr" for what is compiled in. Raises LaunchError for an argument that is not in the CPU's memory.
    """
    codes: list[str] = []
    values: list[str] = []
    scope: dict[str, Any] = {"pack": None, "address": _address, "bf16": _bf16_bits}

    def visit(kind: Any, value: str, name: str) -> None:
        if isinstance(kind, tuple):
            fields = getattr(kind, "_fields", range(len(kind)))
            for index, (each, field) in enumerate(zip(kind, fields, strict=True)):
                visit(each, f"{value}[{index}]", f"{name}.{field}")
        elif kind == "constexpr":
            return
        elif kind.startswith("*"):
            codes.append("Q")
            values.append(f"address({value}, {name!r})")
        elif kind == "bf16":
            codes.append("Q")
            values.append(f"bf16({value})")
        elif kind in _CODES:
            codes.append(_CODES[kind])
            values.append(value)
        else:
            raise LaunchError(f"argument {name}: a {kind} cannot be passed to a kernel on a CPU")

    for index, (name, kind) in enumerate(zip(names, signature, strict=True)):
        visit(kind, f"args[{index}]", name)
    scope["pack"] = struct.Struct("<" + "".join(codes)).pack
    return eval(f"lambda args: pack({', '.join(values)})", scope)


def _address(argument: Any, name: str) -> int:
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    device = getattr(argument, "device", None)
    if device is not None and device.type != "cpu":
        raise LaunchError(f"argument {name} is on {device}, the kernel runs on the CPU: move it with .cpu()")
    return argument.data_ptr()


def _bf16_bits(value: float) -> int:
    """Rounded to nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 & 0xFFFF
