"""What one rank's device computes and copies."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

_SECONDS = 0.25  # for each measurement: as long on all ranks, so that they are measured under each other's load
_LONGEST_S = 0.1  # of one matrix product
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # more than caches hold
_WHOLE = 1 << 28  # bytes: a share of a host's memory is rounded down to a multiple
_LARGEST = {"cpu": 4096, "cuda": 16384}


def device_name(device: torch.device) -> str:
    """The model of a GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def device_type(device: torch.device) -> str:
    """What `triton-ext profile` calls it, too."""
    return "cpu" if device.type == "cpu" else re.sub(r"[^\w.-]+", "-", torch.cuda.get_device_name(device))


def memory_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Of a GPU, or a rank's share of the host's: what the machine has, or the control group may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits) // ranks_on_host // _WHOLE * _WHOLE


def flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """The best over sizes of square matrix products, each the median of its repetitions."""
    best, n = 0.0, 512
    while n <= _LARGEST[device.type]:
        a, b = (torch.rand(n, n, device=device).to(dtype) for _ in range(2))
        out = torch.empty(n, n, device=device, dtype=dtype)
        seconds = _median_s(device, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        best = max(best, 2 * n**3 / seconds)
        if seconds * 8 > _LONGEST_S:
            break
        n *= 2
    return best


def memory_bandwidth_bytes_per_s(device: torch.device) -> float:
    """Of a copy: bytes read and written."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * source.numel() / _median_s(device, lambda: destination.copy_(source))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_s(device: torch.device, run: Callable[[], object]) -> float:
    run()
    synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
