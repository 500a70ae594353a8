"""Profiles of a PyTorch model in Metis's format, with a report of how they were measured."""

from __future__ import annotations

import hashlib
import json
import pickle
import platform
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import outputs
from ..errors import PlanningError
from ..planner.parallel import profile_files
from ..planner.parallel.profiles import Model, Profiles
from . import launch, profile_reports, quota
from .model import LayeredModel, boundaries, load, shardable
from .profiler import Outcome, measure

TOGETHER = "a group of processes, with its communication"
ALONE = "one device with a shard, without the group's communication"
_UNIT_BYTES = 4  # of a parameter, as Metis counts


@dataclass(frozen=True)
class Task:
    """What to measure: every tensor-parallel degree with every number of samples of a micro-batch.

    model is FILE:FUNCTION (see `model.load`) with its arguments. cpu_quota is in cores, 0 for none. Degrees above 1
    are measured with a shard on this device alone, the group's communication left out; with `together`, by that many
    processes of this machine, communication included.
    """

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    degrees: tuple[int, ...] = (1,)
    samples: tuple[int, ...] = (1, 2, 4)
    repeats: int = 5
    threads: int = 1
    cpu_quota: float = 0.0
    together: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("degrees", "samples"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) != len(values):
                raise PlanningError(f"{name} {', '.join(map(str, values)) or '(none)'}: give each once, from 1 on")
        if self.repeats < 1 or self.threads < 1:
            raise PlanningError(f"{self.repeats} repeats with {self.threads} threads; give at least 1 of both")
        if self.device != "cpu" and (self.cpu_quota or self.together):
            raise PlanningError(f"CPU quotas and groups of processes are for CPUs, not for {self.device}")
        try:
            device = torch.device(self.device)
        except RuntimeError:
            device = None
        if device is None or device.type not in ("cpu", "cuda"):
            raise PlanningError(f"device {self.device!r}; give cpu or cuda")
        count = torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            raise PlanningError(f"device {self.device}: this PyTorch sees {count} CUDA devices; give cpu")


def profile(
    task: Task,
    device_type: str,
    timeout_s: float = 600.0,
    report: Callable[[str], None] = lambda line: None,
    folder: Path | None = None,
) -> tuple[Profiles, dict[str, Any]]:
    """The measured points, and the report: configuration, fingerprint, spread, forward and backward by layer, and the
    infeasible points with their reasons. Raises PlanningError for a model that cannot be profiled, and, before it
    measures, for one that is not that of the folder where the profiles are going to be written."""
    launch.check_timeout(timeout_s)
    whole = load(task.model, task.arguments)
    if folder is not None:
        _check_same_model(folder, {"model": task.model, "arguments": task.arguments, **_model_record(task, whole)})
    described = Model(
        task.model.rpartition(":")[2],
        tuple(_UNIT_BYTES * sum(p.numel() for p in layer.parameters()) for layer in whole.layers),
        tuple(value.numel() * value.element_size() for value in boundaries(whole, 1)[1:]),
    )
    degrees = [degree for degree in task.degrees if degree == 1 or not task.together]
    with quota.quotas([task.cpu_quota] if task.cpu_quota else []) as limits:
        outcome = _alone(task, degrees, limits.setting(0) if task.cpu_quota else None, report) if degrees else Outcome()
    for degree in set(task.degrees) - set(degrees):
        part = _together(task, degree, timeout_s, report)
        outcome.measured |= part.measured
        outcome.infeasible |= part.infeasible
    points = {(device_type, *key): result.point for key, result in outcome.measured.items()}
    return Profiles(described, points), _report(task, device_type, whole, outcome, limits.method)


def write(profiles: Profiles, report: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """The profile files, and profile.TYPE.json with the report beside them.

    Raises PlanningError where the folder has another model's profiles: two models' points must not be mixed.
    """
    check_output(folder, report["device_type"])
    _check_same_model(folder, report)
    paths = profile_files.write(profiles, folder)
    beside = folder / f"profile.{report['device_type']}.json"
    beside.write_text(json.dumps(report, indent=2) + "\n")
    return (*paths, beside)


def check_output(folder: Path, device_type: str) -> None:
    """Raises TritonExtError where profiles of a device type cannot be written."""
    outputs.check_folder(folder, "the profiles")
    if not re.fullmatch(r"[^/\x00-\x1f]+", device_type):
        raise PlanningError(f"device type {device_type!r}: it becomes part of file names; give one without slashes")
    profile_reports.load(folder)


def _check_same_model(folder: Path, report: Mapping[str, Any]) -> None:
    for path, other in profile_reports.load(folder).items():
        if other.get("model_sha256") != report["model_sha256"]:
            raise PlanningError(
                f"{folder} has profiles of {other['model']} with {other['arguments']}: {path.name}; write "
                f"those of {report['model']} with {report['arguments']} to another folder"
            )


def default_device_type(task: Task) -> str:
    """A name for the device at hand: cpu-0.25 for a quarter of a core, else what it is."""
    if task.device == "cpu":
        return f"cpu-{task.cpu_quota:g}" if task.cpu_quota else "cpu"
    return re.sub(r"[^\w.-]+", "-", torch.cuda.get_device_name(task.device))


def _alone(task: Task, degrees: Sequence[int], setting: str | None, report: Callable[[str], None]) -> Outcome:
    """Measure in this process; the groups of degrees above 1 are stand-ins that communicate nothing."""
    device = torch.device(task.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    largest = max(degrees)
    if largest > 1:
        dist.init_process_group("fake", rank=0, world_size=largest)
    try:
        models = {degree: _sharded(task, degree, device) for degree in degrees}
        with quota.joined(setting):
            return measure(
                models, task.samples, repeats=task.repeats, device=device, throttled=bool(setting), report=report
            )
    finally:
        torch.set_num_threads(threads)
        if largest > 1:
            dist.destroy_process_group()


def _sharded(task: Task, degree: int, device: torch.device) -> LayeredModel:
    model = load(task.model, task.arguments)
    for layer in model.layers:
        layer.to(device)
    if degree > 1:
        shardable(model, degree).shard(DeviceMesh(device.type, list(range(degree))))
    return model


def _together(task: Task, degree: int, timeout_s: float, report: Callable[[str], None]) -> Outcome:
    """Measure one degree with as many processes. If the kernel ends one, all its points are infeasible."""
    shardable(load(task.model, task.arguments), degree)
    with (
        tempfile.TemporaryDirectory(prefix="triton-ext-profile-") as folder,
        quota.quotas([task.cpu_quota] * degree if task.cpu_quota else []) as limits,
    ):
        settings = [limits.setting(rank) for rank in range(degree)] if task.cpu_quota else []
        (Path(folder) / "order").write_bytes(pickle.dumps((task, degree, settings, timeout_s)))
        try:
            launch.torchrun("triton_ext.training.profile_worker", Path(folder), degree, task.threads, timeout_s, report)
        except PlanningError as error:
            if "SIGKILL" not in str(error):
                raise
            reason = f"out of memory: one of {degree} processes was ended by the kernel"
            return Outcome(infeasible={(degree, size): reason for size in task.samples})
        outcome: Outcome = pickle.loads((Path(folder) / "result.json").read_bytes())
        return outcome


def _report(task: Task, device_type: str, whole: LayeredModel, outcome: Outcome, method: str) -> dict[str, Any]:
    model = _model(task, whole)
    is_cpu = task.device == "cpu"
    device = platform.processor() or platform.machine() if is_cpu else torch.cuda.get_device_name(task.device)
    configuration = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "device_type": device_type,
        "threads": task.threads,
        "cpu_quota": task.cpu_quota or None,
        "quota_method": method if task.cpu_quota else None,
        "tensor_parallel": TOGETHER if task.together else ALONE,
    }
    return {
        "model": task.model,
        "arguments": dict(task.arguments),
        **_model_record(task, whole),
        "sha256": _sha256({**configuration, **model}),
        **configuration,
        "repeats": task.repeats,
        "points": [
            {"tp": tp, "samples": samples, **{k: v for k, v in asdict(result).items() if k != "point"}}
            for (tp, samples), result in sorted(outcome.measured.items())
        ],
        "infeasible": [
            {"tp": tp, "samples": samples, "reason": reason}
            for (tp, samples), reason in sorted(outcome.infeasible.items())
        ],
    }


def _model(task: Task, whole: LayeredModel) -> dict[str, Any]:
    shapes = [[name, list(p.shape), str(p.dtype)] for layer in whole.layers for name, p in layer.named_parameters()]
    return {"model": task.model, "arguments": dict(task.arguments), "parameters": shapes}


def _model_record(task: Task, whole: LayeredModel) -> dict[str, str]:
    return {"model_sha256": _sha256(_model(task, whole))}


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
