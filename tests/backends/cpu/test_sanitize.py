"""Checked kernels: what leaves the memory of a launch's tensors is reported, not performed, and nothing else is."""

import gc
import inspect

import pytest
import torch
import triton
import triton.language as tl

import triton_ext as tx
from collectives import assert_close, copy_out, inputs, make_plan, reference
from triton_ext.errors import MemoryAccessError

COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("TRITON_EXT_SANITIZE", "1")


def line_of(kernel, marker):
    """`file:line` of the line of a kernel that has a text, as a pattern."""
    lines, start = inspect.getsourcelines(kernel.fn)
    (number,) = (i for i, line in enumerate(lines) if marker in line)
    return rf"test_sanitize\.py:{start + number}"


def guarded(count, value=7.0, pad=64):
    """A float32 tensor of `count`, inside memory that is not its own: the tensor, and the memory around it."""
    around = torch.full((count + 2 * pad,), value)
    return torch.frombuffer(around.numpy(), dtype=torch.float32, count=count, offset=4 * pad), around


@triton.jit
def copy(x, out, n, shift, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i + shift, value, mask=i < n)


@triton.jit
def copy_without_mask(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i)  # no mask
    tl.store(out + i, value, mask=i < n)


@triton.jit
def add_at(x, where, shift, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(x + tl.load(where + i, mask=i < n, other=0) + shift, 1.0, mask=i < n)


@triton.jit
def scalars(x, out, load_at, store_at, add_to):
    value = tl.load(x + load_at)
    tl.store(out + store_at, value)  # store
    tl.atomic_add(out + add_to, value)  # add


@triton.jit
def copy_matrix(x, out, rows, columns, stride, BM: tl.constexpr, BN: tl.constexpr):
    i = (tl.program_id(0) * BM + tl.arange(0, BM))[:, None]
    j = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    inside = (i < rows) & (j < columns)
    tl.store(out + i * columns + j, tl.load(x + i * stride + j, mask=inside), mask=inside)


def test_correct_kernels_pass():
    x = torch.randn(1000)
    out = torch.empty(1000)
    copy[(4,)](x, out, 1000, 0, BLOCK=256)
    assert torch.equal(out, x)


def test_a_load_behind_the_end():
    x, out = torch.ones(1000), torch.zeros(1024)
    pattern = (
        rf"kernel copy_without_mask: load outside of every tensor, at .*{line_of(copy_without_mask, '# no mask')}, "
        r"program \(3, 0, 0\), element \(232,\) of a block of \(256,\): its 4 bytes begin 0 bytes behind the end of "
        r"argument x \(float32, shape \(1000,\)\)$"
    )
    with pytest.raises(MemoryAccessError, match=pattern):
        copy_without_mask[(4,)](x, out, 1000, BLOCK=256)
    assert torch.equal(out[:1000], x)


def test_a_store_behind_the_end_changes_nothing_there():
    out, around = guarded(100)
    pattern = (
        rf"kernel copy: store outside .*{line_of(copy, 'tl.store')}, program \(1, 0, 0\), element \(33,\) of a block "
        r"of \(64,\): its 4 bytes begin 0 bytes behind the end of argument out \(float32, shape \(100,\)\)"
    )
    with pytest.raises(MemoryAccessError, match=pattern):
        copy[(2,)](torch.ones(100), out, 100, 3, BLOCK=64)
    assert (around[:67] == 7).all() and (around[164:] == 7).all()
    assert (out[3:] == 1).all()


def test_a_store_before_the_start_changes_nothing_there():
    out, around = guarded(100)
    pattern = r"store .* program \(0, 0, 0\), element \(0,\) .* begin 12 bytes before the start of argument out"
    with pytest.raises(MemoryAccessError, match=pattern):
        copy[(2,)](torch.ones(100), out, 100, -3, BLOCK=64)
    assert (around[:64] == 7).all() and (around[161:] == 7).all()
    assert (out[:97] == 1).all()


def test_an_atomic_outside_changes_nothing_there():
    x, around = guarded(8)
    where = torch.tensor([0, 1, 5, 9, 2])
    pattern = rf"atomic outside .*{line_of(add_at, 'tl.atomic_add')}, .* element \(3,\) .* begin 4 bytes behind the end"
    with pytest.raises(MemoryAccessError, match=pattern):
        add_at[(1,)](x, where, 0, 5, BLOCK=8)
    assert x.tolist() == [8, 8, 8, 7, 7, 8, 7, 7] and (around[72:] == 7).all()
    with pytest.raises(MemoryAccessError, match=r"atomic .* element \(0,\) .* begin 4 bytes before the start of"):
        add_at[(1,)](x, where, -1, 5, BLOCK=8)
    assert (around[:64] == 7).all()


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        ((4, 0, 0), r"load outside .* begin 0 bytes behind the end of argument x"),
        ((-1, 0, 0), r"load outside .* begin 4 bytes before the start of argument x"),
        ((0, 70, 0), r"store outside .* begin 264 bytes behind the end of argument out"),
        ((0, 0, 4), r"atomic outside .* begin 0 bytes behind the end of argument out"),
    ],
)
def test_scalars(arguments, pattern):
    x, _ = guarded(4)
    out, around = guarded(4, 1.0, 128)
    with pytest.raises(MemoryAccessError, match=f"kernel scalars: {pattern}"):
        scalars[(1,)](x, out, *arguments)
    assert (around[:128] == 1).all() and (around[132:] == 1).all()
    scalars[(1,)](x, out, 0, 0, 1)


def test_an_element_that_sticks_out():
    out = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(
        MemoryAccessError, match=r"its 4 bytes begin at byte 8 of 10 of argument out \(uint8, shape \(10,\)\)"
    ):
        copy[(1,)](torch.ones(4, dtype=torch.int32), triton.reinterpret(out, tl.int32), 3, 0, BLOCK=4)


def test_a_wrong_stride():
    x = torch.randn(30, 20)
    out = torch.empty(30, 20)
    copy_matrix[(2, 2)](x, out, 30, 20, 20, BM=16, BN=16)
    assert torch.equal(out, x)
    pattern = r"load .* program \(1, 0, 0\), element \(9, 0\) of a block of \(16, 16\): .* argument x .*\(30, 20\)\)"
    with pytest.raises(MemoryAccessError, match=pattern):
        copy_matrix[(2, 2)](x, out, 30, 20, 24, BM=16, BN=16)


def test_elements_that_are_masked_off_may_be_outside():
    out, around = guarded(3)
    copy[(4,)](torch.ones(3), out, 3, 0, BLOCK=64)
    assert out.tolist() == [1, 1, 1] and (around[67:] == 7).all()


def test_the_bounds_are_those_of_the_storage():
    base = torch.arange(600.0).view(30, 20)
    out = torch.empty(10, 5)
    copy_matrix[(1, 1)](base[5:, 3:], out, 10, 5, 20, BM=16, BN=16)
    assert torch.equal(out, base[5:15, 3:8])
    transposed = torch.empty(5, 8)
    copy_without_mask[(1,)](base.t()[4:], transposed, 40, BLOCK=64)
    assert torch.equal(transposed.flatten(), base.flatten()[4:44])
    pattern = r"4 bytes behind the end of argument x \(float32, shape \(1, 5\), in a storage of 2400 bytes\)"
    with pytest.raises(MemoryAccessError, match=pattern):
        scalars[(1,)](base[29:, 15:], out, 6, 0, 0)


@triton.jit
def sum_rows(x, out, columns, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        total += tl.load(x + tl.program_id(0) * columns + start + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total))


def test_inside_a_loop():
    out = torch.zeros(4)
    sum_rows[(4,)](torch.ones(4, 64), out, 64, BLOCK=32)
    assert out.tolist() == [64] * 4
    with pytest.raises(
        MemoryAccessError, match=r"program \(3, 0, 0\), element \(8,\) of .* behind the end of argument x"
    ):
        sum_rows[(4,)](torch.ones(4, 40), out, 40, BLOCK=16)


@triton.jit
def matmul(a, b, c, depth, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        left = tl.load(a + i[:, None] * depth + start + k[None, :])
        right = tl.load(b + (start + k)[:, None] * BN + j[None, :])  # right
        total = tl.dot(left, right, total)
    tl.store(c + i[:, None] * BN + j[None, :], total)


def test_operands_of_a_product():
    a, b, c = torch.randn(16, 64), torch.randn(64, 32), torch.empty(16, 32)
    matmul[(1,)](a, b, c, 64, BM=16, BN=32, BK=32)
    torch.testing.assert_close(c, a @ b)
    pattern = rf"{line_of(matmul, '# right')}, .*element \(16, 0\) of a block of \(32, 32\): .*end of argument b"
    with pytest.raises(MemoryAccessError, match=pattern):
        matmul[(1,)](a, b[:48].clone(), c, 64, BM=16, BN=32, BK=32)


@triton.jit
def store_far(out, n, first, BLOCK: tl.constexpr):
    program = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    tl.store(out + tl.where(program >= first, n + program, 0) + tl.arange(0, BLOCK), 1.0)


def test_one_report_whatever_threads_do(monkeypatch):
    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", "4")
    out = torch.zeros(64)
    for _ in range(30):
        pattern = r"program \(5, 3, 0\), element \(0,\) .* begin 116 bytes behind the end of argument out"
        with pytest.raises(MemoryAccessError, match=pattern):
            store_far[(8, 64)](out, 64, 29, BLOCK=16)
    store_far[(8, 64)](out, 64, 1 << 20, BLOCK=16)


def test_the_first_of_several_faults_of_a_program():
    with pytest.raises(MemoryAccessError, match=r"load outside .* program \(0, 0, 0\): .*argument x"):
        scalars[(1,)](torch.ones(1), torch.ones(1), 1, 1, 1)


@triton.jit(noinline=True)
def load_one(x, i):
    return tl.load(x + i)  # in a function


@triton.jit
def calls(x, out, n):
    tl.store(out, load_one(x, n) + load_one(x, tl.program_id(0)))


def test_a_function_that_is_not_inlined():
    out = torch.zeros(1)
    calls[(2,)](torch.ones(2), out, 1)
    assert out.item() == 2
    with pytest.raises(MemoryAccessError, match=rf"{line_of(load_one, '# in a function')}, program \(1, 0, 0\)"):
        calls[(2,)](torch.ones(1), out, 0)


@triton.jit
def wait_for(flag, place):
    while tl.atomic_add(flag + place, 0) == 0:
        pass


def test_a_wait_for_what_is_outside_ends():
    with pytest.raises(MemoryAccessError, match=r"atomic outside .* program \(0, 0, 0\)"):
        wait_for[(4,)](torch.zeros(1, dtype=torch.int32), 5)


@triton.jit
def through_descriptors(x, out, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BM, BN])
    place = [tl.program_id(0) * BM, 0]
    target.store(place, source.load(place))  # both


def test_tensor_descriptors():
    x, out = torch.randn(20, 8), torch.empty(20, 8)
    through_descriptors[(2,)](x, out, 20, 8, BM=16, BN=16)
    assert torch.equal(out, x)
    with pytest.raises(MemoryAccessError, match=rf"{line_of(through_descriptors, '# both')}, .* argument x"):
        through_descriptors[(2,)](x, torch.empty(24, 8), 24, 8, BM=16, BN=16)


@triton.jit
def follow(addresses, out, n, BLOCK: tl.constexpr):
    x = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0) * n + i, tl.load(x + i, mask=i < n), mask=i < n)


def test_addresses_that_a_kernel_finds_in_memory():
    parts = [torch.randn(10), torch.randn(10)]
    table = torch.tensor([part.data_ptr() for part in parts])
    out = torch.empty(2, 10)
    with pytest.raises(MemoryAccessError, match=r"load outside .* program \(0, 0, 0\)"):
        follow[(2,)](table, out, 10, BLOCK=16)
    for part in parts:
        assert tx.testing.addressable(part) is part
    follow[(2,)](table, out, 10, BLOCK=16)
    assert torch.equal(out, torch.stack(parts))
    del part, parts[1]
    gc.collect()
    with pytest.raises(MemoryAccessError, match=r"program \(1, 0, 0\)"):
        follow[(2,)](table, out, 10, BLOCK=16)


@triton.jit
def accumulate(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(out + i, mask=i < n)  # before
    tl.store(out + i, before + tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def write_then_read(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, 1.0)
    tl.store(out + i, tl.load(out + i) + 1)


@triton.jit
def bump(out, WHAT: tl.constexpr):
    if WHAT == "add":
        tl.atomic_add(out, 1.0)
    elif WHAT == "overwrite":
        tl.atomic_xchg(out, 1.0)
    else:
        tl.store(out + 1, tl.atomic_xchg(out, 1.0))


def test_reads_of_what_nobody_has_written():
    x = torch.ones(100)
    out = tx.testing.uninitialized(torch.empty(100))
    pattern = (
        rf"kernel accumulate: load of memory that nobody has written, at .*{line_of(accumulate, '# before')}, program "
        r"\(0, 0, 0\), element \(0,\) of a block of \(64,\): its 4 bytes begin at byte 0 of 400 of argument out"
    )
    with pytest.raises(MemoryAccessError, match=pattern):
        accumulate[(2,)](x, out, 100, BLOCK=64)
    out = tx.testing.uninitialized(torch.empty(100))
    copy[(1,)](x, out, 70, 0, BLOCK=128)  # a part
    accumulate[(1,)](x, out, 70, BLOCK=128)
    with pytest.raises(MemoryAccessError, match=r"nobody has written, .* element \(70,\) .* at byte 280 of 400"):
        accumulate[(1,)](x, out, 100, BLOCK=128)
    assert (out[:70] == 3).all()


def test_written_and_read_by_one_kernel():
    out = tx.testing.uninitialized(torch.empty(64))
    write_then_read[(1,)](out, BLOCK=64)
    assert (out == 2).all()


@pytest.mark.parametrize("what, reads", [("add", True), ("overwrite", False), ("exchange", True)])
def test_atomics_on_what_nobody_has_written(what, reads):
    out = tx.testing.uninitialized(torch.empty(2))
    if reads:
        with pytest.raises(MemoryAccessError, match="atomic of memory that nobody has written"):
            bump[(1,)](out, WHAT=what)
    else:
        bump[(1,)](out, WHAT=what)
        accumulate[(1,)](torch.ones(1), out, 1, BLOCK=1)
        assert out[0] == 2


def test_what_torch_writes_counts_as_written():
    out = tx.testing.uninitialized(torch.empty(100))
    out[:50] = 0
    out[50:].zero_()
    accumulate[(2,)](torch.ones(100), out, 100, BLOCK=64)
    assert (out == 1).all()


def test_a_part_that_nobody_has_written():
    whole = torch.zeros(8, 8)
    column = tx.testing.uninitialized(whole[:, 2])
    out = torch.empty(8, 8)
    copy_matrix[(1, 1)](whole, out, 8, 2, 8, BM=8, BN=8)
    with pytest.raises(MemoryAccessError, match=r"nobody has written, .* element \(0, 2\)"):
        copy_matrix[(1, 1)](whole, out, 8, 8, 8, BM=8, BN=8)
    del column
    gc.collect()
    copy_matrix[(1, 1)](whole, out, 8, 8, 8, BM=8, BN=8)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives(collective):
    shape, world = (37, 29), 3

    def rank_main(rank):
        plan = make_plan(collective, shape, torch.float32, rank, world)
        tensors = inputs(world, shape, torch.float32)
        for _ in range(2):
            kernel = copy_out[plan.grid(16, 16)](tensors[rank], plan, *shape, shape[1], BM=16, BN=16, sanitize=True)
            assert kernel.metadata.sanitize
            result = reference(collective, tensors, rank)
            assert_close(plan.result, result.to(plan.result.dtype))
        return True

    assert all(tx.testing.World(world).run(rank_main))


def test_a_fault_on_a_virtual_rank():
    def rank_main(rank):
        plan = make_plan("all_gather", (32, 32), torch.float32, rank, 2)
        rows = 32 if rank == 0 else 20
        copy_out[plan.grid(16, 16)](torch.ones(rows, 32), plan, 32, 32, 32, BM=16, BN=16, sanitize=True)

    with pytest.raises(MemoryAccessError, match=r"kernel copy_out: load outside .* argument x .*\(20, 32\)") as error:
        tx.testing.World(2).run(rank_main)
    assert error.value.__notes__ == ["on virtual rank 1 of 2"]


@triton.jit
def either_way(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i), mask=i < n)


def test_off_by_default_and_kept_apart(monkeypatch):
    monkeypatch.delenv("TRITON_EXT_SANITIZE")
    around = torch.ones(64)
    x = torch.frombuffer(around.numpy(), dtype=torch.float32, count=8)
    out = torch.empty(8)
    plain = either_way[(1,)](x, out, 8, BLOCK=16)
    assert not plain.metadata.sanitize and "tx_check" not in plain.asm["llir"]
    with pytest.raises(MemoryAccessError):
        either_way[(1,)](x, out, 8, BLOCK=16, sanitize=True)
    again = either_way[(1,)](x, out, 8, BLOCK=16)
    checked = either_way.warmup(x, out, 8, BLOCK=16, sanitize=True, grid=(1,))
    assert again is plain and checked.hash != plain.hash and "tx_check" in checked.asm["llir"]


def test_the_environment_is_part_of_the_cache_key(monkeypatch):
    kernels = {}
    for text in ("1", "0", "1"):
        monkeypatch.setenv("TRITON_EXT_SANITIZE", text)
        fresh = triton.jit(either_way.fn)  # has nothing in memory yet
        kernel = fresh[(1,)](torch.ones(16), torch.empty(8), 8, BLOCK=16)
        assert kernel.metadata.sanitize == (text == "1")
        assert kernels.setdefault(text, kernel.hash) == kernel.hash
    assert kernels["0"] != kernels["1"]
