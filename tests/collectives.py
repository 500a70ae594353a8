"""The kernel and the references that tests of collectives share."""

import torch
import triton
import triton.language as tl

import triton_ext as tx
import triton_ext.language as txl
from triton_ext.simulator import Simulation


@triton.jit
def copy_out(x, c, M, N, stride, BM: tl.constexpr, BN: tl.constexpr):
    """Stores a row-major matrix through an epilogue."""
    out = txl.epilogue(c, block_shape=[BM, BN])
    row, column = out.program_tile()
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    value = tl.load(x + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0)
    out.store([row * BM, column * BN], value)


def launch(plan, x, block=(16, 16)):
    """Run copy_out; x: [M, N] with contiguous rows. Returns the plan's result."""
    rows, columns = x.shape
    copy_out[plan.grid(*block)](x, plan, rows, columns, x.stride(0), BM=block[0], BN=block[1])
    return plan.result


PLACEMENTS = {
    "one host": lambda rank: 0,
    "two hosts": lambda rank: rank % 2,
    "two hosts, hierarchical": lambda rank: rank % 2,
    "a host each": lambda rank: rank,
}
placement = "one host"  # of virtual_world and make_plan; tests set it
HIERARCHICAL = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast")


def virtual_world(size):
    """A World whose ranks are on the hosts that `placement` says."""
    return tx.testing.World(size, hosts=[PLACEMENTS[placement](rank) for rank in range(size)])


def chunk(tensor, world, rank, dim):
    """What torch.chunk gives a rank, empty where it gives nothing."""
    size = tensor.shape[dim]
    shard = max(1, -(-size // world))
    start = min(rank * shard, size)
    return tensor.narrow(dim, start, min(shard, size - start))


def reference(collective, tensors, rank, split_dim=0, concat_dim=0, root=0):
    """What `rank` must get; in float64 for reductions of floats."""
    world = len(tensors)
    if collective == "all_to_all":
        return torch.cat([chunk(tensor, world, rank, split_dim) for tensor in tensors], concat_dim)
    if collective == "all_gather":
        return torch.cat(tensors, concat_dim)
    if collective == "broadcast":
        return tensors[root]
    if collective == "put":
        return tensors[(rank - 1) % world]
    wide = torch.float64 if tensors[0].is_floating_point() else torch.int64
    total = torch.stack([tensor.to(wide) for tensor in tensors]).sum(0)
    return total if collective.startswith("all_reduce") else chunk(total, world, rank, split_dim)


def make_plan(collective, shape, dtype, rank, world, split_dim=0, concat_dim=0, **options):
    """The plan that `reference` describes; put sends to the next rank."""
    if placement.endswith("hierarchical") and collective in HIERARCHICAL:
        options.setdefault("schedule", "hierarchical")
    if collective == "all_to_all":
        return tx.all_to_all(shape, dtype, split_dim=split_dim, concat_dim=concat_dim, **options)
    if collective == "all_reduce":
        options.setdefault("shots", 2)
    if collective == "all_reduce_one_shot":
        return tx.all_reduce(shape, dtype, shots=1, **options)
    if collective == "all_gather":
        return tx.all_gather(shape, dtype, concat_dim=concat_dim, **options)
    if collective == "reduce_scatter":
        return tx.reduce_scatter(shape, dtype, split_dim=split_dim, **options)
    if collective == "put":
        return tx.put(shape, dtype, dst=(rank + 1) % world, **options)
    if collective == "broadcast":
        return tx.broadcast(shape, dtype, root=options.pop("root", 0), **options)
    return getattr(tx, collective)(shape, dtype, **options)


def inputs(world, shape, dtype, seed=0):
    """One tensor per rank; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]
    return [torch.randint(-50, 50, shape, generator=generator).to(dtype) for _ in range(world)]


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def assert_close(result, expected):
    """Relative error as acceptance asks: exact for integers, NaN and Inf in their places."""
    assert result.shape == expected.shape
    if not result.is_floating_point():
        assert torch.equal(result.to(torch.int64), expected.to(torch.int64))
        return
    result, expected, tolerance = result.double(), expected.double(), TOLERANCE[result.dtype]
    finite = torch.isfinite(expected)
    assert torch.equal(finite, torch.isfinite(result))
    assert torch.equal(torch.nan_to_num(expected[~finite]), torch.nan_to_num(result[~finite]))
    scale = expected[finite].abs().max().item() if finite.any() else 1.0
    assert (
        (result[finite] - expected[finite]).abs().max().item() <= tolerance * max(scale, 1e-30)
        if finite.any()
        else True
    )


def simulation(collective, world=3, shape=(20, 24), block=(16, 16), dtype=torch.float32, hosts=None, **options):
    """copy_out with a plan of the collective, for the simulator."""
    tensors = inputs(world, shape, dtype)
    rows, columns = shape
    root = {"root": options["root"]} if "root" in options else {}

    def args(rank):
        plan = make_plan(collective, shape, dtype, rank, world, **options)
        sizes = {"M": rows, "N": columns, "stride": columns, "BM": block[0], "BN": block[1]}
        return {"x": tensors[rank], "c": plan, **sizes, "grid": plan.grid(*block)}

    return Simulation(copy_out, world, args, lambda rank: reference(collective, tensors, rank, **root), hosts)
