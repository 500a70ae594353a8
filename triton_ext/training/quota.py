"""CPU quotas for processes, so that ranks on one machine are devices of different speed (Linux).

Through a cgroup where one can be made: version 2 (cpu.max) or 1 (cpu.cfs_quota_us). Elsewhere a helper process stops
and continues the process, which needs no privilege: its share is then of time, not of computing time.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import signals
from ..errors import PlanningError
from ..planner.cluster import Cluster

PERIOD_S = 0.01  # short against a stage's time, so that a step sees an even speed; the kernel's least is 0.001
_LEAST_CORES = 0.1  # at which the kernel's least quota, 1 ms, is used up
_WEIGHT = 8  # against other work on the machine: a quota is to be had, not only not to be exceeded
_ROOT = Path("/sys/fs/cgroup")
_GROUP = re.compile(r"triton-ext-(\d+)-")  # by the process that made it
_NAME = re.compile(r"cpu-(\d+(?:\.\d+)?)")


def checked(cores: float) -> float:
    """A quota in cores; PlanningError for one that cannot be."""
    most = os.cpu_count() or 1
    if not _LEAST_CORES <= cores <= most:
        raise PlanningError(f"a quota of {cores:g} cores; give {_LEAST_CORES} to {most}")
    return cores


def of_devices(cluster: Cluster) -> tuple[float, ...] | None:
    """The quotas of a cluster of CPUs: a device type's name says it, cpu-0.25 being a quarter of a core.

    None if no device type is named so; PlanningError if only some are.
    """
    names = [device.type for device in cluster.devices]
    matches = [_NAME.fullmatch(name) for name in names]
    if not any(matches):
        return None
    if missing := sorted({name for name, match in zip(names, matches, strict=True) if match is None}):
        raise PlanningError(f"device type {missing[0]} has no quota in its name, as cpu-0.25 has; give --cpu-quota")
    return tuple(checked(float(match[1])) for match in matches if match)


def method() -> str:
    """How quotas are set here: "cgroup2", "cgroup1" or "duty-cycle"."""
    for name in ("cgroup2", "cgroup1"):
        if _makes_quotas(name):
            return name
    return "duty-cycle"


def _root(name: str) -> Path:
    return _ROOT if name == "cgroup2" else _ROOT / "cpu"


def _home(name: str) -> Path:
    """The cgroup that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("cpu" in controllers.split(",")) if name == "cgroup1" else not controllers:
            return _root(name) / path.lstrip("/")
    return _root(name)


def _makes_quotas(name: str) -> bool:
    if not (_root(name) / "cgroup.procs").exists():
        return False  # no cgroups of that version, whatever else is there
    probe = _root(name) / f"triton-ext-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    try:
        _write_quota(name, probe, 1.0)
        return True
    except OSError:
        return False
    finally:
        probe.rmdir()


def _write_quota(name: str, group: Path, cores: float) -> None:
    period_us = round(PERIOD_S * 1e6)
    quota_us = round(cores * period_us)
    if name == "cgroup2":
        (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        (group / "cpu.weight").write_text(str(100 * _WEIGHT))
    else:
        (group / "cpu.shares").write_text(str(1024 * _WEIGHT))
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))


@dataclass(frozen=True)
class Quotas:
    """Quotas that processes can have, by number; `method` says how they are kept."""

    cores: tuple[float, ...]
    method: str
    groups: tuple[Path, ...] = ()

    def setting(self, index: int) -> str:
        """For the process that is to have this quota: what `joined` takes, there."""
        return f"{self.cores[index]}:{self.groups[index] if self.groups else ''}"


@contextlib.contextmanager
def quotas(cores: Sequence[float]) -> Iterator[Quotas]:
    """Make one quota for each number of cores; removed at the end of the block, when no process may be in them, also
    by an exception, SIGINT or SIGTERM. What a killed process left is removed when the next one makes quotas.

    Raises PlanningError for a number that cannot be, or if the system refuses.
    """
    amounts = tuple(checked(amount) for amount in cores)
    how = method()
    if how == "duty-cycle":
        yield Quotas(amounts, how)
        return
    root = _root(how)
    _remove_abandoned(root)
    made: list[Path] = []
    with signals.exit_on_sigterm():
        try:
            for index, amount in enumerate(amounts):
                group = root / f"triton-ext-{os.getpid()}-{time.monotonic_ns()}-{index}"
                _make(how, group, amount)
                made.append(group)
            yield Quotas(amounts, how, tuple(made))
        finally:
            for group in made:
                _remove(group)


def _make(how: str, group: Path, cores: float) -> None:
    try:
        group.mkdir()
        _write_quota(how, group, cores)
    except OSError as error:
        raise PlanningError(f"the quota cannot be set: {error}; without one, ranks share the cores") from None


def _remove_abandoned(root: Path) -> None:
    for group in root.glob("triton-ext-*"):
        match = _GROUP.match(group.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(OSError):  # its processes have yet to end
                group.rmdir()


def _remove(group: Path) -> None:
    deadline = time.monotonic() + 5.0  # a process that was killed leaves its group a little later
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextlib.contextmanager
def joined(setting: str | None) -> Iterator[None]:
    """Within the block, this process has the quota of a `Quotas.setting`; with none, all that it gets."""
    if not setting:
        yield
        return
    cores, _, place = setting.partition(":")
    if place:
        group = Path(place)
        home = _home("cgroup2" if (group / "cpu.max").exists() else "cgroup1")
        (group / "cgroup.procs").write_text(str(os.getpid()))  # all threads
        try:
            yield
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
        return
    program = [sys.executable, "-I", "-c", _DUTY_CYCLE, str(os.getpid()), cores, str(PERIOD_S)]
    helper = subprocess.Popen(program, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        helper.send_signal(signal.SIGTERM)
        helper.wait(5.0)


# Stops its parent for the rest of each period. A quota of several cores cannot be kept this way: it counts as 1.
_DUTY_CYCLE = """
import os, signal, sys, time
parent, share, period = int(sys.argv[1]), min(1.0, float(sys.argv[2])), float(sys.argv[3])
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
while not ended and os.getppid() == parent:
    time.sleep(period * share)
    if share < 1 and os.getppid() == parent:
        os.kill(parent, signal.SIGSTOP)
        try:
            time.sleep(period * (1 - share))
        finally:
            os.kill(parent, signal.SIGCONT)
"""
