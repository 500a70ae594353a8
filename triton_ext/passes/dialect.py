"""The contract between what an author types and what the passes see.

The language emits three marker operations, all of them `tt.extern_elementwise` with a `txl.*` symbol, pure, and
with their static attributes as text in `libname`:

    %h = txl.epilogue     %table                                 : !tt.ptr<i64>
    %t = txl.program_tile %h            {libpath = "<dim>"}      : i32
    %m = txl.store        %h, %coordinates..., %value [, %mask]  : tensor<BLOCK x i1>

`%table` is the plan's table in device memory (abi.py). `%m` is the mask of an ordinary `tt.store` of `%value`, which
the passes turn off in favour of stores to the owners. A coordinate is a scalar (the block's start) or a tensor of the
block's shape (an index per element, the same along the other dimensions).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

EPILOGUE = "txl.epilogue"
PROGRAM_TILE = "txl.program_tile"
STORE = "txl.store"

#: Collectives whose values are combined; only their owners read what others sent, inside the kernel.
ONE_SHOT = "all_reduce_one_shot"  # every rank gets all ranks' tensors, and sums them itself
REDUCTIONS = ("all_reduce", "reduce_scatter", ONE_SHOT)
#: Collectives whose tensor is split over ranks along one dimension: an element has one owner.
SPLIT = ("all_to_all", "all_reduce", "reduce_scatter")
#: Collectives that send every element to a range of ranks.
UNSPLIT = ("all_gather", "broadcast", "put", ONE_SHOT)
COLLECTIVES = (*SPLIT, *UNSPLIT)

#: The transport of peers whose slices a thread of the host sends (on a CPU).
PROXY = "proxy"

#: Element types that can be sent, by Triton's name.
DTYPES = ("fp32", "fp16", "bf16", "fp64", "int8", "int16", "int32", "int64", "uint8")


@dataclass(frozen=True)
class Spec:
    """What the compiler must know of a plan. Everything else is data in the plan's table, so that all ranks,
    shapes and epochs share one compiled kernel.

    dtype: element type of the result. wire_dtype: of what is sent to be reduced. acc_dtype: of the sum.
    alignment: elements that are known to divide every row's start in every rank's buffers.
    transport: how peers are reached that stores do not reach: PROXY, or NVSHMEM with its version ("nvshmem-3.8.0"); ""
    without such peers. slice_dim: along which what goes to such a peer is cut into slices.
    """

    collective: str
    ndim: int
    dtype: str
    wire_dtype: str
    acc_dtype: str
    split_dim: int
    alignment: int
    block_shape: tuple[int, ...] = ()
    transport: str = ""
    slice_dim: int = 0

    @property
    def splits(self) -> bool:
        return self.collective in SPLIT

    @property
    def reduces(self) -> bool:
        return self.collective in REDUCTIONS

    @property
    def calls_nvshmem(self) -> bool:
        return self.transport not in ("", PROXY)

    def encode(self) -> str:
        block = "x".join(map(str, self.block_shape))
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"block_shape": block}
        return " ".join(f"{name}={value}" for name, value in values.items() if value != "")

    @staticmethod
    def decode(text: str) -> Spec:
        values = dict(item.split("=", 1) for item in text.split())
        block = tuple(int(size) for size in values.get("block_shape", "").split("x") if size)
        return Spec(
            values["collective"],
            int(values["ndim"]),
            values["dtype"],
            values["wire_dtype"],
            values["acc_dtype"],
            int(values["split_dim"]),
            int(values["alignment"]),
            block,
            values.get("transport", ""),
            int(values.get("slice_dim", 0)),
        )

    def with_block(self, block_shape: tuple[int, ...]) -> Spec:
        return replace(self, block_shape=block_shape)
