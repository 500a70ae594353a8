"""Inputs of the operators for all ranks, and what a rank must get, in float64."""

import torch
import torch.nn.functional as F

import triton_ext as tx
from collectives import chunk


def generators(world, seed=0):
    return [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(world)]


class Gemm:
    """M x K times K x N on each rank."""

    def __init__(self, world, m=33, k=29, n=21, dtype=torch.float32, seed=0):
        self.a = [torch.randn(m, k, generator=g).to(dtype) for g in generators(world, seed)]
        self.b = [torch.randn(k, n, generator=g).to(dtype) for g in generators(world, seed + 1)]
        self.world, self.shape, self.dtype = world, (m, n), dtype

    def call(self, rank, **options):
        return tx.ops.gemm_all_to_all(self.a[rank], self.b[rank], **options)

    def plan(self, rank, **options):
        return tx.all_to_all(self.shape, self.dtype, **options)

    def expected(self, rank):
        products = [a.double() @ b.double() for a, b in zip(self.a, self.b, strict=True)]
        return torch.cat([chunk(product, self.world, rank, 0) for product in products])


class Gemv:
    """B x K times (N x K) transposed on each rank."""

    def __init__(self, world, batch=1, k=45, n=70, dtype=torch.float32, seed=0):
        self.x = [torch.randn(batch, k, generator=g).to(dtype) for g in generators(world, seed)]
        self.w = [torch.randn(n, k, generator=g).to(dtype) for g in generators(world, seed + 1)]
        self.shape, self.dtype = (batch, n), dtype

    def call(self, rank, **options):
        return tx.ops.gemv_all_reduce(self.x[rank], self.w[rank], **options)

    def plan(self, rank, **options):
        return tx.all_reduce(self.shape, self.dtype, **options)

    def expected(self, rank):
        return sum(x.double() @ w.double().T for x, w in zip(self.x, self.w, strict=True))


class Embedding:
    """Tables of 30 rows; bags of 0 to longest - 1 look-ups. tables: of each rank."""

    def __init__(self, world, samples=21, tables=3, dim=20, mode="sum", dtype=torch.float32, seed=0, longest=6):
        self.tables = [tables] * world if isinstance(tables, int) else tables
        self.samples, self.dim, self.mode, self.dtype, self.world = samples, dim, mode, dtype, world
        self.weight, self.starts, self.indices, self.offsets = [], [], [], []
        for count, g in zip(self.tables, generators(world, seed), strict=True):
            sizes = torch.randint(0, longest, (count * samples,), generator=g)
            self.weight.append(torch.randn(count * 30, dim, generator=g).to(dtype))
            self.starts.append(torch.arange(count) * 30)
            self.indices.append(torch.randint(0, 30, (int(sizes.sum()),), generator=g))
            self.offsets.append((sizes.cumsum(0) - sizes).view(count, samples))

    def arguments(self, rank):
        return self.weight[rank], self.starts[rank], self.indices[rank], self.offsets[rank]

    def call(self, rank, **options):
        if "plan" not in options:
            options["total_tables"] = sum(self.tables)
        return tx.ops.embedding_all_to_all(*self.arguments(rank), mode=self.mode, **options)

    def plan(self, rank, **options):
        shape = (self.samples, self.tables[rank], self.dim)
        return tx.all_to_all(shape, self.dtype, split_dim=0, concat_dim=1, **options)

    def expected(self, rank):
        pooled = []
        for source in range(self.world):
            bounds = [*self.offsets[source].flatten().tolist(), len(self.indices[source])]
            for table in range(self.tables[source]):
                rows = self.weight[source][30 * table : 30 * table + 30].double()
                bags = bounds[table * self.samples : (table + 1) * self.samples + 1]
                starts = torch.tensor(bags[:-1], dtype=torch.int64) - bags[0]
                indices = self.indices[source][bags[0] : bags[-1]]
                pooled.append(F.embedding_bag(indices, rows, starts, mode=self.mode))
        whole = torch.stack(pooled, 1) if pooled else torch.zeros(self.samples, 0, self.dim, dtype=torch.float64)
        return chunk(whole, self.world, rank, 0)
