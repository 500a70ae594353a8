"""Start torchrun on this machine, execute plans, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import signals
from ..emulate import processes
from ..errors import PlanningError
from ..planner.parallel.plan import ParallelPlan
from . import layout, quota

_LISTED_LINES = 25  # of the ranks' output, where a run failed
_MOST_TIMEOUT_S = 1e8
_GRACE_S = 5.0  # in which ranks end by themselves after the time is up, each with its own alarm


@dataclass(frozen=True)
class Job:
    """What the ranks execute: every plan `rounds` times for `steps` steps, in turn, after `warmup` steps of each.

    model is FILE:FUNCTION (see `model.load`) with its arguments. cpu_quotas are in cores, by device index of the
    plans; none: the ranks share the machine. With `check`, the first step is compared with one that a single process
    computes.
    """

    plans: tuple[ParallelPlan, ...]
    model: str = "triton_ext.training.transformer:transformer"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1
    steps: int = 5
    warmup: int = 1
    learning_rate: float = 1e-3
    threads: int = 1  # of each rank
    cpu_quotas: tuple[float, ...] = ()
    check: bool = False


@dataclass(frozen=True)
class Measured:
    """What one plan's steps took, from the first rank that begins to the last that ends, and their losses.

    loss_difference and gradient_difference are relative to the single process's loss and to its largest gradient of a
    layer, and the largest over all; None without `Job.check`.
    """

    steps_s: tuple[float, ...]
    losses: tuple[float, ...]
    loss_difference: float | None = None
    gradient_difference: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


@dataclass(frozen=True)
class Order:
    """A job as the ranks get it: devices are ranks, and quotas are settings to join."""

    job: Job
    quotas: tuple[str, ...]
    timeout_s: float


def run(job: Job, timeout_s: float = 300.0, report: Callable[[str], None] | None = None) -> tuple[Measured, ...]:
    """Execute a job under torchrun, one process for each device that a plan uses, joined by gloo.

    `report` gets a line for each step. All processes have ended when this returns, however it does. Raises
    PlanningError for plans that cannot be executed, for ranks that fail, with the end of their output, and after
    `timeout_s`.
    """
    check_timeout(timeout_s)
    if not job.plans:
        raise PlanningError("no plan to run; give at least one")
    for plan in job.plans:
        layout.check(plan)
    for name in ("rounds", "steps", "threads"):
        if getattr(job, name) < 1:
            raise PlanningError(f"{getattr(job, name)} {name}; give at least 1")
    devices = sorted({device for plan in job.plans for stage in plan.stages for device in stage.devices})
    if job.cpu_quotas and devices[-1] >= len(job.cpu_quotas):
        raise PlanningError(f"{len(job.cpu_quotas)} CPU quotas, and a plan that uses device {devices[-1]}; give more")
    ranks = {device: rank for rank, device in enumerate(devices)}
    amounts = [job.cpu_quotas[device] for device in devices] if job.cpu_quotas else []
    with tempfile.TemporaryDirectory(prefix="triton-ext-run-") as folder, quota.quotas(amounts) as limits:
        order = Order(
            dataclasses.replace(job, plans=tuple(plan.renumbered(ranks) for plan in job.plans)),
            tuple(limits.setting(rank) for rank in range(len(amounts))),
            timeout_s,
        )
        (Path(folder) / "order").write_bytes(pickle.dumps(order))
        torchrun("triton_ext.training.worker", Path(folder), len(devices), job.threads, timeout_s, report)
        results = json.loads((Path(folder) / "result.json").read_text())
    return tuple(Measured(**{**result, **_tuples(result)}) for result in results)


def _tuples(result: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(result[name]) for name in ("steps_s", "losses")}


def check_timeout(timeout_s: float) -> None:
    """PlanningError unless it can be waited for: ranks end by an alarm, which 0 would turn off."""
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise PlanningError(f"a timeout of {timeout_s:g} s; give more than 0 and at most {_MOST_TIMEOUT_S:g}")


def torchrun(
    module: str, folder: Path, ranks: int, threads: int, timeout_s: float, report: Callable[[str], None] | None
) -> None:
    """Run a module on some ranks of this machine, with the folder as its argument. It has to write result.json there;
    lines of a file `progress` are reported, and the text of a file `error` is the PlanningError that is raised."""
    name = f"training-{os.getpid()}-{time.monotonic_ns()}"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(
            entry or os.getcwd() for entry in sys.path
        ),  # the caller's package, in any folder
        processes.MARKER: name,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", module, str(folder)]
    deadline = time.monotonic() + timeout_s + _GRACE_S
    with (folder / "output").open("wb") as output, signals.exit_on_sigterm():
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            shown = 0
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
                if report:
                    shown = _report(folder / "progress", shown, report)
            timed_out = process.poll() is None
        finally:
            with signals.signals_deferred():
                processes.end([process])
                processes.end_marked(name)
                process.wait()
    if report:
        _report(folder / "progress", shown, report)
    if (folder / "result.json").is_file() and not process.returncode:
        return
    error = folder / "error"
    if error.is_file():
        raise PlanningError(error.read_text())
    lines = _failure((folder / "output").read_text(errors="replace").splitlines())
    timed_out = timed_out or any("SIGALRM" in line for line in lines)  # a rank's own alarm was first
    what = f"had not ended after {timeout_s:g} s, and were ended" if timed_out else f"failed ({process.returncode})"
    raise PlanningError("\n".join([f"the ranks {what}; the end of their output:", *lines]))


def _failure(lines: Sequence[str]) -> list[str]:
    """The end of what the ranks wrote, and the statuses from torchrun's summary, without the rest of that."""
    first = next((index for index, line in enumerate(lines) if "torch/distributed/elastic" in line), len(lines))
    return [*lines[:first][-_LISTED_LINES:], *(line for line in lines[first:] if line.lstrip().startswith("exitcode"))]


def _report(path: Path, shown: int, report: Callable[[str], None]) -> int:
    """Pass on the complete lines after the first `shown` bytes; returns how many there are now."""
    if not path.is_file():
        return shown
    with path.open() as file:
        file.seek(shown)
        text = file.read()
    complete = text[: text.rfind("\n") + 1]
    for line in complete.splitlines():
        report(line)
    return shown + len(complete)
