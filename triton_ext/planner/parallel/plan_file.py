"""Parallelism plans in JSON files, with what they were made from.

    {
      "format": 1,
      "model": "gpt",
      "plan": {"global_batch": 64, "microbatches": 16, "schedule": "1f1b", "settings": {…},
               "stages": [{"begin": 0, "end": 5, "replicas": [{"devices": [0, 1], "samples": 4}]}, …]},
      "predicted": {"cost_ms": 812.5, "simulated_ms": 820.1},
      "inputs": {"sha256": "…", "version": "0.1.0", "profiles": "…", "cluster": "…", "global_batch": 64,
                 "options": {"algorithm": "ours", …}}
    }

A plan is only as good as the figures it was made with: `inputs` tells whether they are still the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import PlanningError
from ..cluster import Cluster
from ..documents import Count, Entry, Name, check, load_json
from .plan import ParallelPlan, Replica, Settings, Stage
from .profiles import Profiles

Option = bool | int | float | str | None


@dataclass(frozen=True)
class Inputs:
    """What a plan was made from: the package's version, sha256 of the profiles and of the cluster, the global batch
    and the options of the search."""

    version: str
    profiles: str
    cluster: str
    global_batch: int
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of everything together."""
        return _sha256(dataclasses.asdict(self))

    def changes(self, now: Inputs) -> list[str]:
        """What is not what it was, in words; empty if nothing changed."""
        found = []
        for name in ("version", "profiles", "cluster", "global_batch"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                found.append(f"{name}: {_short(before)}, now {_short(after)}")
        for name in sorted(self.options.keys() | now.options.keys()):
            options = [each.options.get(name, "not given") for each in (self, now)]
            if options[0] != options[1]:
                found.append(f"option {name}: {options[0]}, now {options[1]}")
        return found


@dataclass(frozen=True)
class PlanFile:
    """A plan with the model it is for, what it was made from, and the predicted time of a step by cost model and by
    simulation."""

    plan: ParallelPlan
    model: str
    inputs: Inputs
    cost_ms: float | None = None
    simulated_ms: float | None = None

    def check(self, now: Inputs) -> None:
        """Raises PlanningError, which says what changed, unless the plan was made from the same inputs."""
        if changes := self.inputs.changes(now):
            raise PlanningError(f"the plan was made from other inputs: {'; '.join(changes)}; plan again")


def inputs(profiles: Profiles, cluster: Cluster, global_batch: int, options: Mapping[str, Option]) -> Inputs:
    """The fingerprint of a search's inputs. Neither the order of points nor that of options matters."""
    points = [[*key, dataclasses.asdict(profiles.points[key])] for key in sorted(profiles.points)]
    content = {"model": dataclasses.asdict(profiles.model), "points": points}
    try:
        version = metadata.version("triton-ext")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return Inputs(version, _sha256(content), _sha256(dataclasses.asdict(cluster)), global_batch, dict(options))


def dump(file: PlanFile, path: Path) -> None:
    """Write a plan so that `load` gives it back."""
    data = {
        "format": 1,
        "model": file.model,
        "plan": dataclasses.asdict(file.plan),
        "predicted": {"cost_ms": file.cost_ms, "simulated_ms": file.simulated_ms},
        "inputs": {"sha256": file.inputs.sha256, **dataclasses.asdict(file.inputs)},
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> PlanFile:
    """The plan of a JSON file. PlanningError names the file and the field of what is missing, unknown or wrong."""
    return parse(load_json(path, PlanningError), str(path))


def parse(data: object, where: str) -> PlanFile:
    """The plan that a file's contents describe; `where` is named in errors."""
    document = check(_Document, data, where, "plan file", PlanningError)
    recorded = document.inputs.model_dump()
    sha256 = recorded.pop("sha256")
    made_from = Inputs(**recorded)
    if made_from.sha256 != sha256:
        raise PlanningError(
            f"{where}: inputs.sha256 is not that of the inputs beside it: the file was edited; plan again"
        )
    try:
        plan = _plan(document.plan)
    except PlanningError as error:
        raise PlanningError(f"{where}: plan: {error}") from None
    if plan.global_batch != made_from.global_batch:
        raise PlanningError(
            f"{where}: plan.global_batch is {plan.global_batch}, but inputs.global_batch {made_from.global_batch}"
        )
    return PlanFile(plan, document.model, made_from, document.predicted.cost_ms, document.predicted.simulated_ms)


_Index = Annotated[int, Field(ge=0)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Replica(Entry):
    devices: Annotated[list[_Index], Field(min_length=1)]
    samples: _Index


class _Stage(Entry):
    begin: _Index
    end: _Index
    replicas: Annotated[list[_Replica], Field(min_length=1)]


class _Settings(Entry):
    recompute_activations: bool = False
    shard_optimizer: bool = False
    shard_parameters: bool = False
    sequence_parallel: bool = False
    chunks_per_stage: Count = 1


class _Plan(Entry):
    stages: Annotated[list[_Stage], Field(min_length=1)]
    microbatches: Count
    global_batch: Count
    schedule: Literal["1f1b", "gpipe", "interleaved"]
    settings: _Settings = _Settings()


class _Predicted(Entry):
    cost_ms: _Time | None = None
    simulated_ms: _Time | None = None


class _Inputs(Entry):
    sha256: _Sha256
    version: Name
    profiles: _Sha256
    cluster: _Sha256
    global_batch: Count
    options: dict[str, Option] = Field(default_factory=dict)


class _Document(Entry):
    format: Literal[1]
    model: Name
    plan: _Plan
    predicted: _Predicted = _Predicted()
    inputs: _Inputs


def _plan(document: _Plan) -> ParallelPlan:
    stages = [
        Stage(stage.begin, stage.end, tuple(Replica(tuple(r.devices), r.samples) for r in stage.replicas))
        for stage in document.stages
    ]
    settings = Settings(**document.settings.model_dump())
    return ParallelPlan(tuple(stages), document.microbatches, document.global_batch, document.schedule, settings)


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _short(value: str | int) -> str:
    """A checksum by its first digits."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
