"""Checked memory accesses: in front of each, a call that looks its address up in the ranges of the launch.

What the kernel gets is a table of 8-byte words: a report, which the first fault fills in, and the ranges. The fault
that stays is that of the program with the smallest number, so a report does not depend on how threads run.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag

from llvmlite import ir
from xdsl.ir import Operation

from triton_ext.backends.cpu.codegen.emit import Emitter, Index
from triton_ext.backends.cpu.codegen.lltypes import I1, I32, I64, PTR, size_bytes
from triton_ext.backends.cpu.codegen.nest import Nest, Point
from triton_ext.ir import source_line


class Word(IntEnum):
    """Words of the table. RANGES: `COUNT` times first address, address behind the last byte, shadow.

    A shadow has one byte for each of the range, 0 where nothing was written; its address is 0 where that is not kept.
    """

    LOCK = 0
    PROGRAM = 1
    FAULT = 2
    SITE = 3
    ELEMENT = 4
    X = 5
    Y = 6
    Z = 7
    ADDRESS = 8
    GRID_X = 9
    GRID_Y = 10
    COUNT = 11
    RANGES = 12


class Fault(IntEnum):
    OUTSIDE = 1
    UNWRITTEN = 2


class Does(IntFlag):
    READS = 1
    WRITES = 2


NO_PROGRAM = 2**64 - 1
Site = tuple[str, str, tuple[int, ...], int]
"""Operation, `file:line`, shape of the block, and bytes of an element."""


class Checks:
    """Emits the checks of one function."""

    def __init__(self, emit: Emitter, table: ir.Value, program: Sequence[ir.Value], sites: list[Site]) -> None:
        self.emit = emit
        self.table = table
        self._program = program
        self._sites = sites

    def site(self, op: Operation, what: str, does: Does, element: ir.Type, shape: tuple[int, ...] = ()) -> CheckedSite:
        """An operation on a block of elements that are of type `element` in memory."""
        nbytes = size_bytes(element)
        self._sites.append((what, source_line(op), shape, nbytes))
        return CheckedSite(self, len(self._sites) - 1, does, shape, nbytes)

    def call(self, arguments: Sequence[ir.Value]) -> ir.Value:
        types = [PTR, PTR, I64, I1, I64, I64, I64, I32, I32, I32]
        function = self.emit.declare("tx_check", I1, types)
        return self.emit.builder.call(function, [self.table, *arguments, *self._program[:3]])

    def is_over(self) -> ir.Value:
        """Whether nothing that this program still does can change the report."""
        function = self.emit.declare("tx_is_over", I1, [PTR, I32, I32, I32])
        return self.emit.builder.call(function, [self.table, *self._program[:3]])


class CheckedSite:
    """One operation that accesses memory."""

    def __init__(self, checks: Checks, number: int, does: Does, shape: tuple[int, ...], nbytes: int) -> None:
        self._checks, self._number, self._does, self._shape, self._nbytes = checks, number, does, shape, nbytes

    def allows(self, address: ir.Value, mask: ir.Value | None, element: ir.Value | None = None) -> ir.Value:
        """Whether to perform an access: `mask` (None: true) holds, and all its bytes are inside."""
        numbers = [ir.Constant(I64, number) for number in (self._number, int(self._does))]
        mask = mask if mask is not None else ir.Constant(I1, 1)
        element = element if element is not None else ir.Constant(I64, 0)
        return self._checks.call([address, ir.Constant(I64, self._nbytes), mask, *numbers, element])

    def element(self, nest: Nest, point: Point) -> ir.Value:
        """The number of an element of the block, in row-major order."""
        emit = nest.emit
        total: Index = 0
        for coordinate, size in zip(point, self._shape, strict=True):
            total = emit.add(emit.mul(total, size), emit.fold(nest.indices(coordinate)))
        return emit.value(total)


_PROGRAM = f"""
  %grid.x.at = getelementptr i64, ptr %table, i64 {Word.GRID_X.value}
  %grid.y.at = getelementptr i64, ptr %table, i64 {Word.GRID_Y.value}
  %grid.x = load i64, ptr %grid.x.at
  %grid.y = load i64, ptr %grid.y.at
  %x64 = zext i32 %x to i64
  %y64 = zext i32 %y to i64
  %z64 = zext i32 %z to i64
  %planes = mul i64 %z64, %grid.y
  %row = add i64 %planes, %y64
  %rows = mul i64 %row, %grid.x
  %program = add i64 %rows, %x64
  %reported.at = getelementptr i64, ptr %table, i64 {Word.PROGRAM.value}
  %reported = load atomic i64, ptr %reported.at monotonic, align 8
"""


def _store_report() -> str:
    values = {
        Word.FAULT: "%fault", Word.SITE: "%site", Word.ELEMENT: "%element", Word.X: "%x64", Word.Y: "%y64",
        Word.Z: "%z64", Word.ADDRESS: "%begin",
    }  # fmt: skip
    return "".join(
        f"  %report.{word.value} = getelementptr i64, ptr %table, i64 {word.value}\n"
        f"  store i64 {value}, ptr %report.{word.value}\n"
        for word, value in values.items()
    )


FUNCTIONS = f"""
define linkonce_odr i1 @tx_is_over(ptr %table, i32 %x, i32 %y, i32 %z) nounwind {{
{_PROGRAM}
  %over = icmp ule i64 %reported, %program
  ret i1 %over
}}

define linkonce_odr i1 @tx_check(ptr %table, ptr %address, i64 %bytes, i1 %mask, i64 %site, i64 %does, i64 %element,
                                 i32 %x, i32 %y, i32 %z) noinline nounwind {{
entry:
  br i1 %mask, label %check, label %masked
masked:
  ret i1 false
check:
  %begin = ptrtoint ptr %address to i64
  %count.at = getelementptr i64, ptr %table, i64 {Word.COUNT.value}
  %count = load i64, ptr %count.at
  br label %search
search:
  %i = phi i64 [ 0, %check ], [ %i.next, %next ]
  %more = icmp ult i64 %i, %count
  br i1 %more, label %compare, label %report
compare:
  %words = mul i64 %i, 3
  %place = add i64 %words, {Word.RANGES.value}
  %low.at = getelementptr i64, ptr %table, i64 %place
  %high.at = getelementptr i64, ptr %low.at, i64 1
  %shadow.at = getelementptr i64, ptr %low.at, i64 2
  %low = load i64, ptr %low.at
  %high = load i64, ptr %high.at
  %offset = sub i64 %begin, %low
  %size = sub i64 %high, %low
  %starts = icmp ule i64 %offset, %size
  %room = sub i64 %size, %offset
  %fits = icmp ule i64 %bytes, %room
  %inside = and i1 %starts, %fits
  br i1 %inside, label %found, label %next
next:
  %i.next = add i64 %i, 1
  br label %search
found:
  %shadow.word = load i64, ptr %shadow.at
  %shadow.base = inttoptr i64 %shadow.word to ptr
  %shadow = getelementptr i8, ptr %shadow.base, i64 %offset
  %kept = icmp ne i64 %shadow.word, 0
  br i1 %kept, label %kinds, label %allowed
kinds:
  %read.bit = and i64 %does, {Does.READS.value}
  %write.bit = and i64 %does, {Does.WRITES.value}
  %reads = icmp ne i64 %read.bit, 0
  %writes = icmp ne i64 %write.bit, 0
  br i1 %reads, label %look, label %written
look:
  %j = phi i64 [ 0, %kinds ], [ %j.next, %look.next ]
  %j.more = icmp ult i64 %j, %bytes
  br i1 %j.more, label %look.byte, label %written
look.byte:
  %byte.at = getelementptr i8, ptr %shadow, i64 %j
  %byte = load atomic i8, ptr %byte.at monotonic, align 1
  %unwritten = icmp eq i8 %byte, 0
  br i1 %unwritten, label %report, label %look.next
look.next:
  %j.next = add i64 %j, 1
  br label %look
written:
  br i1 %writes, label %mark, label %allowed
mark:
  %k = phi i64 [ 0, %written ], [ %k.next, %mark.byte ]
  %k.more = icmp ult i64 %k, %bytes
  br i1 %k.more, label %mark.byte, label %allowed
mark.byte:
  %mark.at = getelementptr i8, ptr %shadow, i64 %k
  store atomic i8 1, ptr %mark.at monotonic, align 1
  %k.next = add i64 %k, 1
  br label %mark
allowed:
  ret i1 true
report:
  %fault = phi i64 [ {Fault.OUTSIDE.value}, %search ], [ {Fault.UNWRITTEN.value}, %look.byte ]
  %perform = icmp eq i64 %fault, {Fault.UNWRITTEN.value}
{_PROGRAM}
  %first = icmp ult i64 %program, %reported
  br i1 %first, label %lock, label %done
lock:
  %pair = cmpxchg ptr %table, i64 0, i64 1 acquire monotonic
  %locked = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %locked, label %again, label %lock
again:
  %reported.now = load atomic i64, ptr %reported.at monotonic, align 8
  %still.first = icmp ult i64 %program, %reported.now
  br i1 %still.first, label %fill, label %unlock
fill:
{_store_report()}
  store atomic i64 %program, ptr %reported.at monotonic, align 8
  br label %unlock
unlock:
  store atomic i64 0, ptr %table release, align 8
  br label %done
done:
  ret i1 %perform
}}
"""
