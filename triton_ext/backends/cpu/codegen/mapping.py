"""`tt.map_elementwise`: a function of scalars, with control flow of its own, for every element of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir
from xdsl.ir import Operation

from triton_ext.backends.cpu.codegen.lltypes import I64, PTR, element_of, register_type, tensor_shape
from triton_ext.backends.cpu.codegen.nest import At, Nest, Point
from triton_ext.backends.cpu.codegen.tiles import Reshape, Tile
from triton_ext.errors import CompileError
from triton_ext.ir import source_line
from triton_ext.ir.dialect import MapElementwiseOp

if TYPE_CHECKING:
    from triton_ext.backends.cpu.codegen.function import FunctionLowering


def lower_map(lowering: FunctionLowering, op: MapElementwiseOp) -> None:
    """Run the region for `pack` elements at a time, in row-major order."""
    emit, scheduler = lowering.emit, lowering.scheduler
    shape, pack = tensor_shape(op.results[0].type), op.pack.value.data
    sources = [lowering.tile(value) for value in op.srcs]
    count = sources[0].size
    if count % pack:
        raise CompileError(f"{source_line(op)}: {op.name} cannot take {count} elements {pack} at a time")
    groups = [Reshape(source, (count // pack, pack)) for source in sources]
    results = [
        scheduler.buffer((count // pack, pack), Tile((count // pack, pack), element_of(result.type)))
        for result in op.results
    ]
    blocks = list(op.scalar_op.blocks)

    def each(nest: Nest, point: Point) -> None:
        """`point` is in a tile of one column per group."""
        places = [(point[0], At(i)) for i in range(pack)]
        elements = [nest.value(group, place) for group in groups for place in places]
        end = emit.block("mapped")
        returned: list[tuple[list[ir.Value], ir.Block]] = []

        def finish(terminator: Operation) -> None:
            values = [lowering.scalar(value) for value in terminator.operands]
            returned.append((values, emit.builder.block))
            emit.builder.branch(end)

        with lowering.region():
            for argument, element in zip(blocks[0].args, elements, strict=True):
                is_pointer = register_type(argument.type) == PTR
                lowering.define(argument, emit.builder.inttoptr(element, PTR) if is_pointer else element)
            lowering.lower_body(blocks, finish)
        emit.builder.position_at_end(end)
        merged = []
        for index, first in enumerate(returned[0][0]):
            phi = emit.builder.phi(first.type)
            for values, block in returned:
                phi.add_incoming(values[index], block)
            merged.append(emit.builder.ptrtoint(phi, I64) if first.type == PTR else phi)
        for i, value in enumerate(merged):
            results[i // pack].write(nest, places[i % pack], value)

    plan = scheduler.plan((count // pack, pack), groups, vectorize=False)
    plan.shape = (count // pack, 1)
    scheduler.run(plan, each)
    for result, buffer in zip(op.results, results, strict=True):
        lowering.define(result, Reshape(buffer, shape))
