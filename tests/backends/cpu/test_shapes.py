"""Operations of Triton's library that move elements around."""

import pytest
import torch
import triton
import triton.language as tl

N = 32


@triton.jit
def rearrange(x, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    if OP == "sort":
        tl.store(out + i, tl.sort(value))
    elif OP == "flip":
        tl.store(out + i, tl.flip(value, 0))
    elif OP == "gather":
        tl.store(out + i, tl.gather(value, i * 3 % N, 0))
    elif OP == "cat":
        tl.store(out + tl.arange(0, 2 * N), tl.cat(value, -value, can_reorder=True))
    elif OP == "permute":
        tl.store(out + i, tl.permute(tl.reshape(value, [2, 4, 4]), [2, 0, 1]).reshape(N))


EXPECTED = {
    "sort": lambda x: x.sort().values,
    "flip": lambda x: x.flip(0),
    "gather": lambda x: x[torch.arange(N) * 3 % N],
    "cat": lambda x: torch.cat([x, -x]),
    "permute": lambda x: x.view(2, 4, 4).permute(2, 0, 1).reshape(-1),
}


@pytest.mark.parametrize("op", EXPECTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float64], ids=str)
def test_rearrange(op, dtype):
    x = (torch.randn(N) * 100).to(dtype)
    expected = EXPECTED[op](x)
    out = torch.zeros_like(expected)
    rearrange[(1,)](x, out, op, N)
    assert torch.equal(out, expected)


@triton.jit
def _affine(a, b):
    return a * 2 + b


@triton.jit
def scan(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.associative_scan(tl.load(x + i), 0, _affine))


def test_a_scan_of_ones_own():
    x, out = torch.randint(0, 3, (8,)), torch.zeros(8, dtype=torch.int64)
    scan[(1,)](x, out, N=8)
    running, expected = 0, []
    for v in x.tolist():
        running = running * 2 + v if expected else v
        expected.append(running)
    assert out.tolist() == expected


def test_random_numbers_are_philox():
    @triton.jit
    def rand(out, seed, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.rand(seed, i))

    first, second = torch.zeros(1024), torch.zeros(1024)
    rand[(1,)](first, 42, N=1024)
    rand[(1,)](second, 42, N=1024)
    assert torch.equal(first, second) and first.unique().numel() > 1000
    assert first.min() >= 0 and first.max() < 1 and abs(first.mean() - 0.5) < 0.05


def test_print(capfd):
    @triton.jit
    def show(x):
        tl.device_print("value", tl.load(x))

    show[(1,)](torch.tensor([2.5]))
    torch.empty(1)
    import ctypes

    ctypes.CDLL(None).fflush(None)
    assert "value: 2.5" in capfd.readouterr().out
