"""Facts about the operations of a function that decide what is computed when."""

from __future__ import annotations

from xdsl.dialects import scf
from xdsl.ir import Block, BlockArgument, Operation, OpResult, SSAValue
from xdsl.traits import IsTerminator

from triton_ext.backends.cpu.codegen import elementwise
from triton_ext.ir import dialect as tt

_VIEWS = {
    "tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.cat", "tt.join", "tt.split",
    "tt.addptr", "tt.make_range",
}  # fmt: skip
_EFFECTS = {
    "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.atomic_store", "tt.atomic_load", "tt.atomic_poll", "tt.call",
    "tt.print", "gpu.barrier", "ttg.barrier",
}  # fmt: skip


def is_lazy(op: Operation) -> bool:
    """Whether the result is an expression that its consumers evaluate."""
    return op.name in _VIEWS or op.name == "tt.load" or elementwise.is_elementwise(op)


def is_terminator(op: Operation) -> bool:
    return op.has_trait(IsTerminator)


def is_loop(op: Operation) -> bool:
    return isinstance(op, (scf.ForOp, scf.WhileOp))


def has_side_effect(op: Operation) -> bool:
    """Whether memory that others can see may change, or must be in order, at `op` or inside of it."""
    return op.name in _EFFECTS or any(has_side_effect(inner) for region in op.regions for inner in region.walk())


def pointer_origin(value: SSAValue) -> SSAValue | None:
    """The scalar pointer that a tile of pointers was made from."""
    while True:
        if isinstance(value, BlockArgument):
            parent = value.block.parent_op()
            if isinstance(parent, scf.ForOp) and value.index > 0:
                value = parent.iter_args[value.index - 1]
                continue
            return value
        assert isinstance(value, OpResult)
        if value.op.name not in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.bitcast"):
            return value
        value = value.op.operands[0]


def steps_uniformly(argument: SSAValue, yielded: SSAValue) -> bool:
    """Whether a loop only adds the same number to every element of the tile that it carries."""
    value = yielded
    while value is not argument:
        if not isinstance(value, OpResult) or value.op.name not in ("tt.addptr", "arith.addi"):
            return False
        left, right = value.op.operands
        if _is_uniform(right):
            value = left
        elif value.op.name == "arith.addi" and _is_uniform(left):
            value = right
        else:
            return False
    return True


def _is_uniform(value: SSAValue) -> bool:
    return isinstance(value, OpResult) and (value.op.name == "tt.splat" or isinstance(value.op, tt.ConstantOp))


class Liveness:
    """Uses of the values of one function."""

    def __init__(self, function: tt.FuncOp) -> None:
        self._index: dict[Operation, int] = {}
        self._consumers: dict[SSAValue, set[object]] = {}
        self._uses: dict[SSAValue, tuple[int, frozenset[Operation], bool]] = {}
        ops = list(function.walk())
        for op in ops:
            for region in op.regions:
                for block in region.blocks:
                    self._index.update((inner, i) for i, inner in enumerate(block.ops))
        for op in reversed(ops):
            for result in op.results:
                self._consumers[result] = self._find_consumers(result)

    def shared(self, value: SSAValue) -> bool:
        """Whether more than one loop nest evaluates `value`."""
        return len(self._consumers.get(value, ())) > 1

    def uses_from(self, value: SSAValue, op: Operation) -> tuple[bool, bool]:
        """Whether `value`, defined in `op`'s block, is used inside of `op`'s regions, and after `op`."""
        last, nested, _ = self._uses_of(value)
        return op in nested, last > self._index[op]

    def leaves_block(self, value: SSAValue) -> bool:
        """Whether another block of the same region uses `value`."""
        return self._uses_of(value)[2]

    def _uses_of(self, value: SSAValue) -> tuple[int, frozenset[Operation], bool]:
        if value not in self._uses:
            last, nested, leaves = -1, set(), False
            for use in value.uses:
                ancestor = _ancestor(use.operation, block_of(value))
                if ancestor is None:
                    leaves, last = True, 1 << 60
                    continue
                last = max(last, self._index[ancestor])
                if ancestor is not use.operation:
                    nested.add(ancestor)
            self._uses[value] = last, frozenset(nested), leaves
        return self._uses[value]

    def _find_consumers(self, value: SSAValue) -> set[object]:
        consumers: set[object] = set()
        block = block_of(value)
        for use in value.uses:
            user = use.operation
            ancestor = _ancestor(user, block)
            if ancestor is None or (ancestor is not user and is_loop(ancestor)):
                consumers |= {(user, 0), (user, 1)}  # evaluated again and again
            elif is_lazy(user):
                kept = self.shared(user.results[0]) and elementwise.cost(user) > 1
                consumers |= {user} if kept else set().union(*(self._consumers.get(r, ()) for r in user.results))
            else:
                consumers.add((user, use.index) if is_terminator(user) else user)
            if len(consumers) > 1:
                break
        return consumers


def block_of(value: SSAValue) -> Block | None:
    """The block that defines `value`."""
    return value.owner if isinstance(value.owner, Block) else value.owner.parent


def _ancestor(op: Operation, block: Block | None) -> Operation | None:
    """The operation of `block` that is or contains `op`."""
    current: Operation | None = op
    while current is not None and current.parent is not block:
        current = current.parent_op()
    return current
