"""xDSL declarations of the operations that Triton prints at the end of its stage "ttir".

The declarations are as loose as a reader can afford: Triton's verifier has already run, so a type constraint
here would only repeat it. Operands are always defined before they are used in this IR, hence a parser takes
an operand's type from its definition and reads the printed types only for what is new.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import ClassVar, Self

from xdsl.dialects import arith, math, scf
from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    DenseArrayBase,
    Float8E4M3FNType,
    Float8E5M2Type,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    FunctionType,
    IndexType,
    IntegerAttr,
    IntegerType,
    StringAttr,
    SymbolRefAttr,
    TensorType,
    i1,
    i32,
)
from xdsl.ir import Attribute, Dialect, Operation, ParametrizedAttribute, Region, SSAValue, TypeAttribute
from xdsl.irdl import (
    AnyOf,
    AttrSizedOperandSegments,
    BaseAttr,
    IRDLOperation,
    attr_def,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_attr_def,
    opt_operand_def,
    param_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import AttrParser, Parser
from xdsl.printer import Printer
from xdsl.traits import IsTerminator


@irdl_attr_definition
class PointerType(ParametrizedAttribute, TypeAttribute):
    """`!tt.ptr<f32>`: a pointer to a scalar, or (block pointers, up to Triton 3.7) to a tensor."""

    name = "tt.ptr"
    pointee: Attribute = param_def()
    address_space: IntegerAttr = param_def()

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            pointee = parser.parse_type()
            space = parser.parse_integer() if parser.parse_optional_punctuation(",") else 1
        return [pointee, IntegerAttr(space, i32)]

    def print_parameters(self, printer: Printer) -> None:
        with printer.in_angle_brackets():
            printer.print_attribute(self.pointee)


class _Hints(ParametrizedAttribute):
    """`<key = value, ...>`: advice about a loop or an access, which a reader passes over."""

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        def hint() -> None:
            parser.parse_identifier()
            parser.parse_punctuation("=")
            if parser.parse_optional_identifier() is None:
                parser.parse_attribute()

        with parser.in_angle_brackets():
            parser.parse_comma_separated_list(Parser.Delimiter.NONE, hint)
        return []


@irdl_attr_definition
class CachePolicy(_Hints):
    name = "tt.cache_policy"


@irdl_attr_definition
class LoopLicm(_Hints):
    name = "llvm.loop_licm"


@irdl_attr_definition
class LoopAnnotation(_Hints):
    name = "llvm.loop_annotation"


def _optional_operand(parser: Parser) -> SSAValue | None:
    """An operand that is already defined."""
    operand = parser.parse_optional_unresolved_operand()
    if operand is None:
        return None
    values = parser.ssa_values.get(operand.operand_name, ())
    if operand.index >= len(values):
        parser.raise_error(f"%{operand.operand_name} is used before its definition", operand.span)
    return values[operand.index]


def _operand(parser: Parser) -> SSAValue:
    return parser.expect(lambda: _optional_operand(parser), "operand expected")


def _operands(parser: Parser) -> list[SSAValue]:
    """A possibly empty comma-separated list of operands."""
    operands = parser.parse_optional_undelimited_comma_separated_list(
        lambda: _optional_operand(parser), lambda: _operand(parser)
    )
    return operands or []


def _types(parser: Parser) -> list[Attribute]:
    return list(parser.parse_comma_separated_list(Parser.Delimiter.NONE, parser.parse_type))


def _attributes(parser: Parser) -> dict[str, Attribute]:
    return dict(parser.parse_optional_attr_dict())


def _keyword(parser: Parser) -> StringAttr:
    return StringAttr(parser.parse_identifier())


def _element(type_: Attribute) -> Attribute:
    """What a pointer, or each pointer of a tensor, points to."""
    if isinstance(type_, TensorType):
        return TensorType(_element(type_.element_type), type_.get_shape())
    assert isinstance(type_, PointerType)
    return type_.pointee


class _Cast(IRDLOperation):
    """`op %src {attrs} : T -> R`, with as many results of type R as the operation declares."""

    RESULTS: ClassVar[int] = 1

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = _operands(parser)
        for flag in ("allow_reorder", "efficient_layout"):
            parser.parse_optional_keyword(flag)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        _types(parser)
        parser.parse_punctuation("->")
        result = parser.parse_type()
        return cls.create(operands=operands, result_types=[result] * cls.RESULTS, attributes=attributes)


class _Unary(_Cast):
    src = operand_def()
    result = result_def()


class _Binary(_Cast):
    lhs = operand_def()
    rhs = operand_def()
    result = result_def()


@irdl_op_definition
class IntToPtrOp(_Unary):
    name = "tt.int_to_ptr"


@irdl_op_definition
class PtrToIntOp(_Unary):
    name = "tt.ptr_to_int"


@irdl_op_definition
class BitcastOp(_Unary):
    name = "tt.bitcast"


@irdl_op_definition
class FpToFpOp(_Unary):
    name = "tt.fp_to_fp"
    rounding = opt_attr_def(StringAttr)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        src = _operand(parser)
        attributes = _attributes(parser)
        if parser.parse_optional_punctuation(","):
            parser.parse_keyword("rounding")
            parser.parse_punctuation("=")
            attributes["rounding"] = _keyword(parser)
        parser.parse_punctuation(":")
        parser.parse_type()
        parser.parse_punctuation("->")
        return cls.create(operands=[src], result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class SplatOp(_Unary):
    name = "tt.splat"


@irdl_op_definition
class UnsplatOp(_Unary):
    name = "tt.unsplat"

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        src = _operand(parser)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        source_type = parser.parse_type()
        assert isinstance(source_type, TensorType)
        return cls.create(operands=[src], result_types=[source_type.element_type], attributes=attributes)


@irdl_op_definition
class ExpandDimsOp(_Unary):
    name = "tt.expand_dims"
    axis = attr_def(IntegerAttr)


@irdl_op_definition
class BroadcastOp(_Unary):
    name = "tt.broadcast"


@irdl_op_definition
class ReshapeOp(_Unary):
    name = "tt.reshape"


@irdl_op_definition
class TransOp(_Unary):
    name = "tt.trans"
    order = attr_def(Attribute)


@irdl_op_definition
class HistogramOp(_Cast):
    name = "tt.histogram"
    src = operand_def()
    mask = opt_operand_def()
    result = result_def()


@irdl_op_definition
class CatOp(_Binary):
    name = "tt.cat"


@irdl_op_definition
class JoinOp(_Binary):
    name = "tt.join"


@irdl_op_definition
class SplitOp(_Cast):
    name = "tt.split"
    RESULTS: ClassVar[int] = 2
    src = operand_def()
    lhs = result_def()
    rhs = result_def()


@irdl_op_definition
class InlineAsmOp(_Cast):
    """`tt.elementwise_inline_asm "text" {attrs} %a, ... : T, ... -> R, ...`"""

    name = "tt.elementwise_inline_asm"
    args = var_operand_def()
    res = var_result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes: dict[str, Attribute] = {"asm_string": StringAttr(parser.parse_str_literal())}
        attributes |= _attributes(parser)
        operands = _operands(parser)
        if operands:
            parser.parse_punctuation(":")
            _types(parser)
        parser.parse_punctuation("->")
        return cls.create(operands=operands, result_types=_types(parser), attributes=attributes)


@irdl_op_definition
class MapElementwiseOp(IRDLOperation):
    """Runs its region, of scalars, for every `pack` elements of tensors of one shape."""

    name = "tt.map_elementwise"
    srcs = var_operand_def()
    pack = prop_def(IntegerAttr)
    scalar_op = region_def()
    res = var_result_def()


class _SameType(IRDLOperation):
    """`op %a, %b, ... [, propagateNan = none] {attrs} : T`: every operand and the result are of type T."""

    args = var_operand_def()
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = [_operand(parser)]
        attributes: dict[str, Attribute] = {}
        while parser.parse_optional_punctuation(","):
            if parser.parse_optional_keyword("propagateNan"):
                parser.parse_punctuation("=")
                attributes["propagateNan"] = _keyword(parser)
            else:
                operands.append(_operand(parser))
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        return cls.create(operands=operands, result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class ClampFOp(_SameType):
    name = "tt.clampf"
    propagateNan = attr_def(StringAttr)


@irdl_op_definition
class PreciseSqrtOp(_SameType):
    name = "tt.precise_sqrt"


@irdl_op_definition
class PreciseDivFOp(_SameType):
    name = "tt.precise_divf"


@irdl_op_definition
class MulhiUIOp(_SameType):
    name = "tt.mulhiui"


@irdl_op_definition
class AddPtrOp(IRDLOperation):
    name = "tt.addptr"
    ptr = operand_def()
    offset = operand_def()
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = _operands(parser)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        types = _types(parser)
        return cls.create(operands=operands, result_types=[types[0]], attributes=attributes)


def _memory_modifiers(parser: Parser) -> dict[str, Attribute]:
    """`cacheModifier = cg evictionPolicy = evict_last {attrs}`, each part optional, in any order."""
    attributes: dict[str, Attribute] = {}
    while (key := parser.parse_optional_keyword_in(("cacheModifier", "evictionPolicy"))) is not None:
        parser.parse_punctuation("=")
        attributes[key] = _keyword(parser)
    return attributes | _attributes(parser)


@irdl_op_definition
class LoadOp(IRDLOperation):
    """Loads where `mask` holds; elsewhere the result is `other`, or undefined without it."""

    name = "tt.load"
    ptr = operand_def()
    mask = opt_operand_def()
    other = opt_operand_def()
    isVolatile = opt_attr_def(IntegerAttr)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = _operands(parser)
        attributes = _memory_modifiers(parser)
        parser.parse_punctuation(":")
        result = _element(parser.parse_type())
        groups = [[operand] for operand in operands] + [[]] * (3 - len(operands))
        return cls.build(operands=groups, result_types=[result], attributes=attributes)


@irdl_op_definition
class StoreOp(IRDLOperation):
    name = "tt.store"
    ptr = operand_def()
    value = operand_def()
    mask = opt_operand_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = _operands(parser)
        attributes = _memory_modifiers(parser)
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls.create(operands=operands, attributes=attributes)


def _order_and_scope(parser: Parser) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {}
    for key in ("sem", "scope"):
        attributes[key] = _keyword(parser)
        parser.parse_punctuation(",")
    return attributes


class _Atomic(IRDLOperation):
    """`op [kind,] sem, scope, %ptr, ... {attrs} : (T...) -> R`; memory order and scope become attributes."""

    HAS_KIND: ClassVar[bool] = False
    sem = attr_def(StringAttr)
    scope = attr_def(StringAttr)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes: dict[str, Attribute] = {}
        if cls.HAS_KIND:
            attributes["atomic_rmw_op"] = _keyword(parser)
            parser.parse_punctuation(",")
        attributes |= _order_and_scope(parser)
        operands = _operands(parser)
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        type_ = parser.parse_function_type()
        return cls.create(operands=operands, result_types=type_.outputs.data, attributes=attributes)


@irdl_op_definition
class AtomicRMWOp(_Atomic):
    name = "tt.atomic_rmw"
    HAS_KIND: ClassVar[bool] = True
    atomic_rmw_op = attr_def(StringAttr)
    ptr = operand_def()
    val = operand_def()
    mask = opt_operand_def()
    result = result_def()


@irdl_op_definition
class AtomicCASOp(_Atomic):
    name = "tt.atomic_cas"
    ptr = operand_def()
    cmp = operand_def()
    val = operand_def()
    result = result_def()


@irdl_op_definition
class AtomicLoadOp(_Atomic):
    name = "tt.atomic_load"
    ptr = operand_def()
    mask = opt_operand_def()
    result = result_def()


@irdl_op_definition
class AtomicStoreOp(IRDLOperation):
    name = "tt.atomic_store"
    sem = attr_def(StringAttr)
    scope = attr_def(StringAttr)
    ptr = operand_def()
    val = operand_def()
    mask = opt_operand_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes = _order_and_scope(parser)
        operands = _operands(parser)
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        _types(parser)
        return cls.create(operands=operands, attributes=attributes)


@irdl_op_definition
class AtomicPollOp(IRDLOperation):
    """Waits until memory holds `expected`, at most `timeout` nanoseconds; whether it came to that."""

    name = "tt.atomic_poll"
    sem = attr_def(StringAttr)
    scope = attr_def(StringAttr)
    ptr = operand_def()
    expected = operand_def()
    timeout = opt_operand_def()
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes = _order_and_scope(parser)
        operands = _operands(parser)
        if parser.parse_optional_keyword("timeout"):
            operands.append(_operand(parser))
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        _types(parser)
        parser.parse_punctuation("->")
        return cls.create(operands=operands, result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class GatherOp(IRDLOperation):
    name = "tt.gather"
    src = operand_def()
    indices = operand_def()
    axis = attr_def(IntegerAttr)
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        src = _operand(parser)
        with parser.in_square_brackets():
            indices = _operand(parser)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        type_ = parser.parse_function_type()
        return cls.create(operands=[src, indices], result_types=type_.outputs.data, attributes=attributes)


@irdl_op_definition
class ExternElementwiseOp(IRDLOperation):
    name = "tt.extern_elementwise"
    srcs = var_operand_def()
    symbol = attr_def(StringAttr)
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = _operands(parser)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        type_ = parser.parse_function_type()
        return cls.create(operands=operands, result_types=type_.outputs.data, attributes=attributes)


class _ProgramAxis(IRDLOperation):
    """`op x : i32`"""

    axis = attr_def(StringAttr)
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes: dict[str, Attribute] = {"axis": _keyword(parser)}
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        return cls.create(result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class GetProgramIdOp(_ProgramAxis):
    name = "tt.get_program_id"


@irdl_op_definition
class GetNumProgramsOp(_ProgramAxis):
    name = "tt.get_num_programs"


@irdl_op_definition
class MakeRangeOp(IRDLOperation):
    name = "tt.make_range"
    start = attr_def(IntegerAttr)
    end = attr_def(IntegerAttr)
    result = result_def()
    assembly_format = "attr-dict `:` type($result)"


@irdl_op_definition
class DotOp(IRDLOperation):
    """`d = a @ b + c`"""

    name = "tt.dot"
    a = operand_def()
    b = operand_def()
    c = operand_def()
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        operands = [_operand(parser)]
        attributes: dict[str, Attribute] = {}
        while parser.parse_optional_punctuation(","):
            if parser.parse_optional_keyword("inputPrecision"):
                parser.parse_punctuation("=")
                attributes["inputPrecision"] = _keyword(parser)
            else:
                operands.append(_operand(parser))
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        parser.parse_type()
        parser.parse_characters("*")
        parser.parse_type()
        parser.parse_punctuation("->")
        return cls.create(operands=operands, result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class DotScaledOp(IRDLOperation):
    """`d = (a * a_scale) @ (b * b_scale) + c`, where a scale belongs to a run of elements along the depth."""

    name = "tt.dot_scaled"
    a = operand_def()
    b = operand_def()
    c = operand_def()
    a_scale = opt_operand_def()
    b_scale = opt_operand_def()
    a_elem_type = attr_def(StringAttr)
    b_elem_type = attr_def(StringAttr)
    lhs_k_pack = opt_attr_def(IntegerAttr)
    rhs_k_pack = opt_attr_def(IntegerAttr)
    result = result_def()
    irdl_options = (AttrSizedOperandSegments(as_property=True),)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        factors: list[SSAValue] = []
        scales: list[list[SSAValue]] = []
        for _ in range(2):
            factors.append(_operand(parser))
            scales.append([_operand(parser)] if parser.parse_optional_keyword("scale") else [])
            parser.parse_punctuation(",")
        operands = [*([factor] for factor in factors), [_operand(parser)], *scales]
        attributes: dict[str, Attribute] = {}
        for keyword, key in (("lhs", "a_elem_type"), ("rhs", "b_elem_type")):
            parser.parse_keyword(keyword)
            parser.parse_punctuation("=")
            attributes[key] = _keyword(parser)
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        _types(parser)
        parser.parse_characters("*")
        _types(parser)
        parser.parse_punctuation("->")
        return cls.build(operands=operands, result_types=[parser.parse_type()], attributes=attributes)


@irdl_op_definition
class ReduceOp(IRDLOperation):
    name = "tt.reduce"
    srcs = var_operand_def()
    axis = prop_def(IntegerAttr)
    combine = region_def("single_block")
    res = var_result_def()


@irdl_op_definition
class ScanOp(IRDLOperation):
    name = "tt.scan"
    srcs = var_operand_def()
    axis = prop_def(IntegerAttr)
    reverse = prop_def(IntegerAttr)
    combine = region_def("single_block")
    res = var_result_def()


class _Return(IRDLOperation):
    """`op {attrs} %a, %b : T, U`, with the values optional."""

    srcs = var_operand_def()
    traits = traits_def(IsTerminator())

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes = _attributes(parser)
        operands = _operands(parser)
        if operands:
            attributes |= _attributes(parser)
            parser.parse_punctuation(":")
            _types(parser)
        return cls.create(operands=operands, attributes=attributes)


@irdl_op_definition
class ReduceReturnOp(_Return):
    name = "tt.reduce.return"


@irdl_op_definition
class ScanReturnOp(_Return):
    name = "tt.scan.return"


@irdl_op_definition
class MapElementwiseReturnOp(_Return):
    name = "tt.map_elementwise.return"


@irdl_op_definition
class ReturnOp(_Return):
    name = "tt.return"


@irdl_op_definition
class PrintOp(IRDLOperation):
    name = "tt.print"
    prefix = attr_def(StringAttr)
    hex = opt_attr_def(IntegerAttr)
    isSigned = opt_attr_def(DenseArrayBase)
    args = var_operand_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        prefix = StringAttr(parser.parse_str_literal())
        attributes = {"prefix": prefix} | _attributes(parser)
        operands: list[SSAValue] = []
        if parser.parse_optional_punctuation(":"):
            operands = _operands(parser)
            parser.parse_punctuation(":")
            _types(parser)
        return cls.create(operands=operands, attributes=attributes)


@irdl_op_definition
class AssertOp(IRDLOperation):
    name = "tt.assert"
    condition = operand_def()
    message = attr_def(StringAttr)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        condition = _operand(parser)
        parser.parse_punctuation(",")
        attributes = {"message": StringAttr(parser.parse_str_literal())} | _attributes(parser)
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls.create(operands=[condition], attributes=attributes)


@irdl_op_definition
class CallOp(IRDLOperation):
    name = "tt.call"
    callee = attr_def(SymbolRefAttr)
    args = var_operand_def()
    res = var_result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        callee = SymbolRefAttr(parser.parse_symbol_name())
        with parser.in_parens():
            operands = _operands(parser)
        attributes = {"callee": callee} | _attributes(parser)
        parser.parse_punctuation(":")
        type_ = parser.parse_function_type()
        return cls.create(operands=operands, result_types=type_.outputs.data, attributes=attributes)


@irdl_op_definition
class FuncOp(IRDLOperation):
    """A kernel (public) or a function that was not inlined (private)."""

    name = "tt.func"
    sym_name = attr_def(StringAttr)
    function_type = attr_def(FunctionType)
    sym_visibility = opt_attr_def(StringAttr)
    body = region_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        visibility = parser.parse_optional_visibility_keyword()
        name = parser.parse_symbol_name()
        arguments = []

        def parse_argument() -> None:
            argument = parser.parse_argument()
            _attributes(parser)  # hints such as tt.divisibility
            argument.location = parser.parse_optional_location()
            arguments.append(argument)

        parser.parse_comma_separated_list(Parser.Delimiter.PAREN, parse_argument)
        results: Sequence[Attribute] = ()
        if parser.parse_optional_punctuation("->"):
            listed = parser.parse_optional_comma_separated_list(Parser.Delimiter.PAREN, parser.parse_type)
            results = listed or [parser.parse_type()]
        extra = parser.parse_optional_attr_dict_with_keyword()
        attributes: dict[str, Attribute] = dict(extra.data) if extra else {}
        attributes["sym_name"] = name
        attributes["function_type"] = FunctionType.from_lists([a.type for a in arguments], results)
        if visibility is not None:
            attributes["sym_visibility"] = visibility
        body = parser.parse_region(arguments)
        return cls.create(attributes=attributes, regions=[body])


_ADDRESS_SPACES = ("all", "none", "local", "global_read", "global_write", "tensor_read", "tensor_write")


class _Barrier(IRDLOperation):
    """A barrier of one program's threads; its operands and flags do not matter to a reader."""

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        while parser.parse_optional_keyword_in(_ADDRESS_SPACES) or parser.parse_optional_punctuation("|"):
            pass
        return cls.create(attributes=_attributes(parser))


@irdl_op_definition
class GpuBarrierOp(_Barrier):
    name = "gpu.barrier"


@irdl_op_definition
class TtgBarrierOp(_Barrier):
    name = "ttg.barrier"


@irdl_op_definition
class AssumeOp(IRDLOperation):
    name = "llvm.intr.assume"
    condition = operand_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        condition = parser.parse_operand(i1)
        attributes = _attributes(parser)
        parser.parse_punctuation(":")
        parser.parse_type()
        return cls.create(operands=[condition], attributes=attributes)


class WhileOp(scf.WhileOp):
    """`scf.while`, which Triton's printer writes without its parentheses when nothing is carried."""

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        if parser.parse_optional_punctuation(":") is None:
            return super().parse(parser)
        type_ = parser.parse_function_type()
        before = parser.parse_region()
        parser.parse_characters("do")
        after = parser.parse_region()
        parser.parse_optional_attr_dict_with_keyword()
        return cls((), type_.outputs.data, before, after)


class ElementwiseOp(IRDLOperation):
    """`op [predicate,] %a, ... [flags<...>] {attrs} : T [to R]` of the arith and math dialects.

    xDSL's own classes for these assume scalars in places (comparisons, select), so all of them are read here.
    """

    args = var_operand_def()
    res = var_result_def()
    predicate = opt_attr_def(StringAttr)

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes: dict[str, Attribute] = {}
        if cls.name in ("arith.cmpi", "arith.cmpf"):
            attributes["predicate"] = _keyword(parser)
            parser.parse_punctuation(",")
        operands = _operands(parser)
        while (flag := parser.parse_optional_keyword_in(("fastmath", "overflow"))) is not None:
            with parser.in_angle_brackets():
                flags = parser.parse_comma_separated_list(Parser.Delimiter.NONE, parser.parse_identifier)
            attributes[flag] = StringAttr(",".join(flags))
        attributes |= _attributes(parser)
        parser.parse_punctuation(":")
        type_ = _types(parser)[-1]
        if parser.parse_optional_keyword("to"):
            type_ = parser.parse_type()
        if "predicate" in attributes:
            type_ = TensorType(i1, type_.get_shape()) if isinstance(type_, TensorType) else i1
        results = [type_] * (2 if cls.name.endswith("_extended") else 1)
        return cls.create(operands=operands, result_types=results, attributes=attributes)


@irdl_op_definition
class ConstantOp(IRDLOperation):
    """A scalar, or a tensor filled with one value. `value` is the scalar in either case.

    MLIR prints infinities and NaNs as bit patterns, which xDSL's own class takes for numbers.
    """

    name = "arith.constant"
    value = attr_def(AnyOf((BaseAttr(IntegerAttr), BaseAttr(FloatAttr))))
    result = result_def()

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        attributes = _attributes(parser)
        if parser.parse_optional_keyword("dense"):
            with parser.in_angle_brackets():
                literal = parser.parse_number(allow_boolean=True)
            parser.parse_punctuation(":")
            type_ = parser.parse_type()
        else:
            literal = parser.parse_number(allow_boolean=True)
            type_ = parser.parse_type() if parser.parse_optional_punctuation(":") else i1
        element = type_.element_type if isinstance(type_, TensorType) else type_
        if isinstance(element, AnyFloat):
            number = float(literal) if isinstance(literal, float) else _from_bits(int(literal), element)
            attributes["value"] = FloatAttr(number, element)
        else:
            assert isinstance(element, IntegerType | IndexType)
            attributes["value"] = IntegerAttr(int(literal), element)
        return cls.create(result_types=[type_], attributes=attributes)


def _from_bits(bits: int, type_: Attribute) -> float:
    if isinstance(type_, Float8E5M2Type | Float8E4M3FNType):
        return float(next(iter(type_.unpack(bytes([bits]), 1))))
    if isinstance(type_, BFloat16Type):
        return float(struct.unpack("<f", (bits << 16).to_bytes(4, "little"))[0])
    codes: dict[type[Attribute], tuple[str, int]] = {
        Float16Type: ("<e", 2),
        Float32Type: ("<f", 4),
        Float64Type: ("<d", 8),
    }
    code, size = codes[type(type_)]
    return float(struct.unpack(code, bits.to_bytes(size, "little"))[0])


def _with_elementwise(base: Dialect, *others: type[Operation], extra: Sequence[str] = ()) -> Dialect:
    """`base` with every operation but `others`, and the `extra` that xDSL lacks, read as an ElementwiseOp."""
    names = {op.name for op in base.operations} - {op.name for op in others} | {*extra}
    elementwise: list[type[Operation]] = [
        irdl_op_definition(type(name, (ElementwiseOp,), {"name": name, "__module__": __name__}))
        for name in sorted(names)
    ]
    return Dialect(base.name, [*others, *elementwise], list(base.attributes))


def _operations(prefix: str) -> list[type[Operation]]:
    return [
        value
        for value in globals().values()
        if isinstance(value, type)
        and issubclass(value, IRDLOperation)
        and value.__module__ == __name__
        and getattr(value, "name", "").startswith(prefix)
    ]


TRITON = Dialect("tt", _operations("tt."), [PointerType, CachePolicy])
TRITON_GPU = Dialect("ttg", _operations("ttg."), [])
GPU = Dialect("gpu", _operations("gpu."), [])
LLVM = Dialect("llvm", _operations("llvm."), [LoopLicm, LoopAnnotation])


ARITH = _with_elementwise(arith.Arith, ConstantOp, extra=["arith.remf"])
MATH = _with_elementwise(math.Math)
SCF = Dialect("scf", [WhileOp, *(op for op in scf.Scf.operations if op.name != "scf.while")], list(scf.Scf.attributes))

__all__ = ["ARITH", "GPU", "LLVM", "MATH", "SCF", "TRITON", "TRITON_GPU", "PointerType", "Region"]
