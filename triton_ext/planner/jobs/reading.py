"""Jobs and clusters from YAML or JSON files; errors name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import PlanningError
from .job import Flow, Job
from .network import Link, Network, clos


@dataclass(frozen=True)
class Cluster:
    network: Network
    levels: int


@dataclass(frozen=True)
class _Field:
    """A value in a file, and where it is."""

    value: Any
    where: str

    def wrong(self, what: str) -> PlanningError:
        return PlanningError(f"{self.where}: {what}")

    def fields(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Field]:
        known = ", ".join((*required, *optional))
        if not isinstance(self.value, dict):
            raise self.wrong(f"{self.value!r} is not a mapping; give {known}")
        for key in self.value:
            if key not in (*required, *optional):
                raise self.wrong(f"unknown field {key}; known are {known}")
        for key in required:
            if key not in self.value:
                raise self.wrong(f"{key} is missing; needed are {', '.join(required)}")
        return {key: _Field(value, f"{self.where}.{key}") for key, value in self.value.items()}

    def items(self) -> list[_Field]:
        if not isinstance(self.value, list):
            raise self.wrong(f"{self.value!r} is not a list")
        return [_Field(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self.wrong(f"{self.value!r} is not a name")
        return self.value

    def number(self, least: float = 0.0, most: float = float("inf"), above: bool = True) -> float:
        """A number; also as text, which is what YAML 1.1 takes 25e9 for."""
        try:
            if isinstance(self.value, bool):
                raise ValueError
            number = float(self.value)
        except (TypeError, ValueError):
            raise self.wrong(f"{self.value!r} is not a number") from None
        if not ((number > least if above else number >= least) and number <= most and number < float("inf")):
            limit = f"{'above' if above else 'at least'} {least:g}" + (f" and at most {most:g}" if most < 1e300 else "")
            raise self.wrong(f"{self.value!r} is out of range; it must be {limit}")
        return number

    def whole(self) -> int:
        number = self.number(1, above=False)
        if number != int(number):
            raise self.wrong(f"{self.value!r} is not a whole number")
        return int(number)


def read_cluster(file: Path) -> Cluster:
    """{"levels": K, "clos": {…}} or {"levels": K, "links": [{"from", "to", "bytes_per_second", "one_way"}, …]}."""
    top = _load(file).fields(("levels",), ("clos", "links"))
    levels = top["levels"].whole()
    if ("clos" in top) == ("links" in top):
        raise PlanningError(f"{file}: give either clos or links")
    return Cluster(_clos(top["clos"]) if "clos" in top else _links(top["links"]), levels)


def read_jobs(file: Path, network: Network) -> tuple[Job, ...]:
    """{"jobs": [{"name", "gpus", "compute_flop", "compute_s", "overlap_start", "flows": [...]}, …]}.

    A flow is {"from", "to", "bytes"}.
    overlap_start (1) and flows (none) may be left out.
    """
    nodes = {node for link in network.links for node in (link.source, link.destination)}
    jobs: dict[str, Job] = {}
    for item in _load(file).fields(("jobs",))["jobs"].items():
        fields = item.fields(("name", "gpus", "compute_flop", "compute_s"), ("overlap_start", "flows"))
        name = fields["name"].text()
        if name in jobs:
            raise fields["name"].wrong(f"{name} is already the name of another job")
        jobs[name] = Job(
            name,
            fields["gpus"].whole(),
            fields["compute_flop"].number(),
            fields["compute_s"].number(),
            tuple(_flow(flow, network, nodes) for flow in (fields["flows"].items() if "flows" in fields else [])),
            fields["overlap_start"].number(0, 1, above=False) if "overlap_start" in fields else 1.0,
        )
    if not jobs:
        raise PlanningError(f"{file}: jobs is empty; give at least one")
    return tuple(jobs.values())


def _flow(field: _Field, network: Network, nodes: set[str]) -> Flow:
    fields = field.fields(("from", "to", "bytes"))
    for end in ("from", "to"):
        if fields[end].text() not in nodes:
            some = ", ".join(sorted(nodes)[:8])
            raise fields[end].wrong(f"the cluster has no node {fields[end].value}; it has {len(nodes)}: {some}, …")
    flow = Flow(fields["from"].text(), fields["to"].text(), fields["bytes"].number())
    try:
        network.paths(flow.source, flow.destination)
    except PlanningError as error:
        raise field.wrong(str(error)) from None
    return flow


def _clos(field: _Field) -> Network:
    counts = ("tors", "hosts_per_tor", "aggregations")
    speeds = ("host_bytes_per_second", "uplink_bytes_per_second")
    fields = field.fields((*counts, *speeds))
    return clos(*(fields[name].whole() for name in counts), *(fields[name].number() for name in speeds))


def _links(field: _Field) -> Network:
    links = []
    for item in field.items():
        fields = item.fields(("from", "to", "bytes_per_second"), ("one_way",))
        source, destination = fields["from"].text(), fields["to"].text()
        if source == destination:
            raise fields["to"].wrong(f"a link from {source} to itself; name another node")
        if "one_way" in fields and not isinstance(fields["one_way"].value, bool):
            raise fields["one_way"].wrong(f"{fields['one_way'].value!r} is neither true nor false")
        capacity = fields["bytes_per_second"].number()
        links.append(Link(source, destination, capacity))
        if not ("one_way" in fields and fields["one_way"].value):
            links.append(Link(destination, source, capacity))
    return Network(tuple(links))


def _load(file: Path) -> _Field:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"{file}: it cannot be read: {error}") from None
    parse: Callable[[str], Any]
    if file.suffix == ".json":
        parse, wrong = json.loads, (ValueError,)
    else:
        import yaml  # only where a file needs it

        parse, wrong = yaml.safe_load, (yaml.YAMLError,)  # type: ignore[assignment]
    try:
        return _Field(parse(text), str(file))
    except wrong as error:
        raise PlanningError(f"{file}: not valid {'JSON' if file.suffix == '.json' else 'YAML'}: {error}") from None
