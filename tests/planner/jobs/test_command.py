"""`triton-ext priorities`: its table, its file, and errors that point at the field."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from triton_ext.cli import app
from triton_ext.errors import PlanningError
from triton_ext.planner.jobs.network import clos
from triton_ext.planner.jobs.reading import read_cluster, read_jobs

CLUSTER: dict[str, Any] = {
    "levels": 2,
    "links": [{"from": "a", "to": "b", "bytes_per_second": 1}, {"from": "b", "to": "c", "bytes_per_second": 2.0}],
}
JOBS: dict[str, Any] = {
    "jobs": [
        {
            "name": "one",
            "gpus": 10,
            "compute_flop": 10e12,
            "compute_s": 2,
            "flows": [{"from": "a", "to": "b", "bytes": 2}],
        },
        {
            "name": "two",
            "gpus": 10,
            "compute_flop": "5e12",
            "compute_s": 1,
            "flows": [{"from": "a", "to": "b", "bytes": 1}],
        },
        {"name": "quiet", "gpus": 1, "compute_flop": 1e12, "compute_s": 1},
    ]
}


def write(directory: Path, jobs: Any = JOBS, cluster: Any = CLUSTER) -> list[str]:
    for name, value in (("jobs", jobs), ("cluster", cluster)):
        (directory / f"{name}.json").write_text(json.dumps(value))
    return ["priorities", str(directory / "jobs.json"), "--cluster", str(directory / "cluster.json")]


def test_table_and_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*write(tmp_path), "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["two", "10", "1.000", "a", "->", "b", "5.0", "1.50", "7.5", "0"] in lines
    assert ["one", "10", "2.000", "a", "->", "b", "5.0", "1.00", "5.0", "1"] in lines
    assert ["quiet", "1", "-", "-", "-", "-", "-", "0"] in lines
    plan = {job.pop("name"): job for job in json.loads((tmp_path / "plan.json").read_text())["jobs"]}
    assert plan["two"] == {"priority_flop_per_s": pytest.approx(7.5e12), "level": 0, "paths": [["a", "b"]]}
    assert plan["quiet"]["priority_flop_per_s"] is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("jobs", 0, "gpus"), 0, "jobs[0].gpus: 0 is out of range; it must be at least 1"),
        (("jobs", 0, "gpus"), 1.5, "jobs[0].gpus: 1.5 is not a whole number"),
        (("jobs", 0, "compute_s"), "fast", "jobs[0].compute_s: 'fast' is not a number"),
        (("jobs", 0, "compute_s"), True, "jobs[0].compute_s: True is not a number"),
        (("jobs", 0, "compute_flop"), -1, "jobs[0].compute_flop: -1 is out of range; it must be above 0"),
        (("jobs", 0, "compute_flop"), "nan", "jobs[0].compute_flop: 'nan' is out of range"),
        (
            ("jobs", 0, "overlap_start"),
            2,
            "jobs[0].overlap_start: 2 is out of range; it must be at least 0 and at most 1",
        ),
        (("jobs", 1, "name"), "one", "jobs[1].name: one is already the name of another job"),
        (("jobs", 1, "flows", 0, "to"), "z", "jobs[1].flows[0].to: the cluster has no node z; it has 3: a, b, c"),
        (("jobs", 1, "flows", 0), {"from": "a"}, "jobs[1].flows[0]: to is missing"),
        (("jobs", 1, "flows"), 3, "jobs[1].flows: 3 is not a list"),
        (("jobs", 1, "colour"), 3, "jobs[1]: unknown field colour"),
        (("jobs", 1), "x", "jobs[1]: 'x' is not a mapping"),
        (("jobs",), [], "jobs is empty"),
        (("levels",), 0, "levels: 0 is out of range"),
        (("clos",), {}, "give either clos or links"),
        (("links", 1, "bytes_per_second"), 0, "links[1].bytes_per_second: 0 is out of range"),
        (("links", 1, "to"), "b", "links[1].to: a link from b to itself"),
        (("links", 1, "one_way"), 1, "links[1].one_way: 1 is neither true nor false"),
    ],
)
def test_errors_point_at_the_field(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    jobs, cluster = copy.deepcopy(JOBS), copy.deepcopy(CLUSTER)
    place: Any = jobs if path[0] == "jobs" else cluster
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    result = CliRunner().invoke(app, write(tmp_path, jobs, cluster))
    assert result.exit_code == 1
    assert message in result.output.replace("\n", " ")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match=r"nowhere\.json: it cannot be read"):
        read_cluster(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanningError, match=r"broken\.json: not valid JSON"):
        read_cluster(tmp_path / "broken.json")


def test_one_way_links(tmp_path: Path) -> None:
    cluster = copy.deepcopy(CLUSTER)
    cluster["links"][0]["one_way"] = True
    arguments = write(
        tmp_path, {"jobs": [JOBS["jobs"][0] | {"flows": [{"from": "b", "to": "a", "bytes": 1}]}]}, cluster
    )
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and "jobs[0].flows[0]: no path from b to a" in result.output


def test_the_example_in_yaml() -> None:
    pytest.importorskip("yaml")
    directory = Path(__file__).parents[3] / "examples" / "priorities"
    cluster = read_cluster(directory / "cluster.yaml")
    assert cluster.network == clos(2, 4, 2, 50e9, 50e9) and cluster.levels == 3
    jobs = read_jobs(directory / "jobs.yaml", cluster.network)
    assert [job.gpus for job in jobs] == [32, 8, 8, 16, 4] and jobs[0].flows[0].size_bytes == 20e9
    arguments = ["priorities", str(directory / "jobs.yaml"), "--cluster", str(directory / "cluster.yaml")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    documented = (directory.parents[1] / "docs" / "priorities.md").read_text()
    assert "\n".join(line.strip() for line in result.output.strip().splitlines()) in documented


def test_the_planner_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys\nfrom triton_ext.planner.jobs import baselines, exhaustive, report\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'triton', 'triton_ext.runtime')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
