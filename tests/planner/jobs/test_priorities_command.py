"""`triton-ext priorities`: its table, its file, and errors that point at the field."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from networks import clos
from triton_ext.cli import app
from triton_ext.errors import PlanningError
from triton_ext.planner import cluster_file
from triton_ext.planner.jobs import job_file, report
from triton_ext.planner.jobs.job import Flow, Job

NODE: dict[str, Any] = {"devices": [{"type": "T4", "count": 10}], "fabric": {"bandwidth_gb_per_s": 1, "latency_us": 0}}
CLUSTER: dict[str, Any] = {
    "nodes": [NODE | {"name": name} for name in ("a", "b", "c")],
    "switches": ["s"],
    "links": [
        {"from": name, "to": "s", "bandwidth_gb_per_s": width, "latency_us": 0}
        for name, width in (("a", 1e-9), ("b", 1), ("c", 1))
    ],
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
            "compute_flop": 5e12,
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


def test_table_settings_and_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*write(tmp_path), "--json", str(tmp_path / "plan.json")])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["two", "10", "1", "a", "->", "s", "5", "1.5", "7.5", "0"] in lines
    assert ["one", "10", "2", "a", "->", "s", "5", "1", "5", "1"] in lines
    assert ["quiet", "1", "-", "-", "-", "-", "-", "0"] in lines
    assert ["one:", "TRITON_EXT_PRIORITY=1"] in lines
    plan = {job.pop("name"): job for job in json.loads((tmp_path / "plan.json").read_text())["jobs"]}
    assert plan["two"] == {
        "priority_flop_per_s": pytest.approx(7.5e12),
        "level": 0,
        "environment": {"TRITON_EXT_PRIORITY": "0"},
        "paths": [{"class": None, "nodes": ["a", "s", "b"]}],
    }
    assert plan["quiet"]["priority_flop_per_s"] is None


def test_levels_are_an_option(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*write(tmp_path), "--levels", "1"])
    assert "two: TRITON_EXT_PRIORITY=0" in result.output and "one: TRITON_EXT_PRIORITY=0" in result.output
    for levels, status in (("0", 2), ("64", 0), ("65", 2)):
        assert CliRunner().invoke(app, [*write(tmp_path), "--levels", levels]).exit_code == status


@pytest.mark.parametrize("names", [("[/oops]", "x"), ("sweep[a]", "sweep[b]"), (":smile:", "[bold]x"), ("a\\", "[b]")])
def test_names_are_printed_as_they_are(tmp_path: Path, names: tuple[str, str]) -> None:
    jobs, cluster = json.loads(json.dumps([JOBS, CLUSTER]).replace('"a"', json.dumps(f"n{names[1]}")))
    for job, name in zip(jobs["jobs"], names, strict=False):
        job["name"] = name
    result = CliRunner().invoke(app, [*write(tmp_path, jobs, cluster), "--simulate", "9"])
    assert result.exit_code == 0, result.output
    for name in names:
        rows = [line.split() for line in result.output.splitlines() if line]
        assert sum(row[0] == name for row in rows) == sum(row[0] == f"{name}:" for row in rows) == 1
        assert any(row[0] == "policy" and name in row for row in rows)
    assert f"n{names[1]} -> s" in result.output


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e6])
def test_small_and_large_numbers_keep_their_digits(tmp_path: Path, scale: float) -> None:
    jobs = copy.deepcopy(JOBS)
    for job in jobs["jobs"]:
        job["compute_flop"] *= 1.2345 * scale
        job["compute_s"] *= 1.2345 * scale
        for flow in job.get("flows", ()):
            flow["bytes"] *= 1.2345 * scale
    result = CliRunner().invoke(app, [*write(tmp_path, jobs), "--simulate", str(36.5 * 1.2345 * scale)])
    assert result.exit_code == 0, result.output
    rows = {row[0]: row for line in result.output.splitlines() if (row := line.split())}
    assert float(rows["one"][2]) == pytest.approx(2 * 1.2345 * scale, rel=1e-3)
    assert [rows["one"][6], rows["two"][6]] == ["5", "5"]
    assert float(rows["Crux"][1]) == pytest.approx(0.1965 * 1.2345 * scale, rel=1e-3)


@pytest.mark.parametrize(("flop", "size"), [(1e300, 1), (1e-300, 1), (1e12, 1e-300), (1e12, 1e300), (1e190, 1)])
@pytest.mark.parametrize("options", [(), ("--simulate", "1e15")])
def test_numbers_that_overflow_are_refused(tmp_path: Path, flop: float, size: float, options: tuple[str, ...]) -> None:
    jobs = copy.deepcopy(JOBS)
    jobs["jobs"][0] |= {"compute_flop": flop, "compute_s": 1e14, "flows": [{"from": "a", "to": "b", "bytes": size}]}
    jobs["jobs"][1:] = []
    cluster = json.loads(json.dumps(CLUSTER).replace("1e-09", "1e10"))
    result = CliRunner().invoke(app, [*write(tmp_path, jobs, cluster), *options])
    if flop == 1e190 and not options:
        assert result.exit_code == 0
    else:
        assert result.exit_code == 1 and "job one: " in result.output and "can be reckoned with" in result.output


def test_published_devices_need_no_file(tmp_path: Path) -> None:
    text = json.dumps(JOBS).replace('"a"', '"T4.0"').replace('"b"', '"T4.1"')
    (tmp_path / "jobs.json").write_text(text)
    result = CliRunner().invoke(app, ["priorities", str(tmp_path / "jobs.json"), "--cluster", "T4=30"])
    assert result.exit_code == 1 and "the job's flows join 2 nodes with 8 devices" in result.output
    (tmp_path / "jobs.json").write_text(text.replace('"gpus": 10', '"gpus": 4'))
    result = CliRunner().invoke(app, ["priorities", str(tmp_path / "jobs.json"), "--cluster", "T4=30"])
    assert result.exit_code == 0 and "T4.0 -> switch" in result.output


def written(directory: Path, *jobs: tuple[int, str]) -> Path:
    """GPUs of each job, and its nodes."""
    entries = [
        {
            "name": f"j{i}",
            "gpus": gpus,
            "compute_flop": 1,
            "compute_s": 1,
            "flows": [{"from": nodes[0], "to": other, "bytes": 1} for other in nodes[1:]],
        }
        for i, (gpus, nodes) in enumerate(jobs)
    ]
    (directory / "jobs.json").write_text(json.dumps({"jobs": entries}))
    return directory / "jobs.json"


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (((20, "ab"), (2, "ac")), r"node a has 10 devices, and their jobs need 11 \(j0 at least 10, j1 at least 1\)"),
        (((16, "ab"), (16, "ba")), r"node a has 10 devices, and their jobs need 12 \(j0 at least 6, j1 at least 6\)"),
        ((*[(2, "ab")] * 10, (2, "bc")), "node b has 10 devices, and their jobs need 11"),
        (((10, "ab"), (10, "bc"), (10, "ca")), ""),
        (((19, "ab"), (11, "bc")), ""),
    ],
)
def test_no_node_is_promised_twice(tmp_path: Path, jobs: tuple[tuple[int, str], ...], message: str) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER | {"links": [
        *({"from": name, "to": "s", "bandwidth_gb_per_s": 1, "latency_us": 0} for name in "abc"),
    ]}))  # fmt: skip
    cluster = cluster_file.load(tmp_path / "cluster.json")
    if message:
        with pytest.raises(PlanningError, match=f"jobs.json: jobs: {message}"):
            job_file.load(written(tmp_path, *jobs), cluster)
    else:
        assert len(job_file.load(written(tmp_path, *jobs), cluster)) == len(jobs)


def test_policies_compared(tmp_path: Path) -> None:
    """The paper's first example: two jobs on one link, the second first."""
    result = CliRunner().invoke(app, [*write(tmp_path), "--simulate", "36.5"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["policy", "Pflop", "computing", "quiet", "two", "one"] in lines
    crux = next(line for line in lines if line[:1] == ["Crux"])
    assert [int(crux[-2]), int(crux[-1])] == [18, 6]  # 6 s and 4 s of the link in every 12 s
    assert {line[0] for line in lines if line} >= {"ECMP", "SJF", "Sincronia", "TACCL*"}
    refused = CliRunner().invoke(app, [*write(tmp_path), "--simulate", "0"])
    assert refused.exit_code == 1 and "a simulation of 0.0 s" in refused.output


def test_path_classes() -> None:
    """Of the two jobs that cross the racks one has both flows on one switch, the other has one on each."""
    cluster = clos(2, 2, 2, 10, 10)
    same = Job("same", 4, 9, 1, (Flow("host0", "host2", 1), Flow("host2", "host0", 1)))
    both = Job("both", 4, 1, 1, (Flow("host1", "host3", 1), Flow("host1", "host3", 2)))
    near = Job("near", 4, 1, 1, (Flow("host0", "host1", 1),))
    plan = report.plan(cluster, (same, both, near), 8)
    assert report.environment(plan, same) == {"TRITON_EXT_PRIORITY": "0", "TRITON_EXT_PATH_CLASS": "0"}
    assert {choice["class"] for choice in json.loads(report.as_json(plan))["jobs"][2]["paths"]} == {0, 1}
    assert "TRITON_EXT_PATH_CLASS" not in report.environment(plan, both)
    assert "TRITON_EXT_PATH_CLASS" not in report.environment(plan, near)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("jobs", 0, "gpus"), 0, "jobs[0].gpus: 0: input should be greater than or equal to 1"),
        (("jobs", 0, "gpus"), 1.5, "jobs[0].gpus: 1.5: input should be a valid integer"),
        (("jobs", 0, "gpus"), 21, "jobs[0].gpus: 21: the job's flows join 2 nodes with 20 devices"),
        (("jobs", 0, "gpus"), 1, "jobs[0].gpus: 1: the job's flows join 2 nodes"),
        (("jobs", 2, "gpus"), 11, "jobs.json: jobs: they have 31 GPUs together; the cluster has 30 devices"),
        (("jobs", 0, "compute_s"), "fast", "jobs[0].compute_s: 'fast': input should be a valid number"),
        (("jobs", 0, "compute_flop"), -1, "jobs[0].compute_flop: -1: input should be greater than 0"),
        (("jobs", 0, "compute_flop"), math.inf, "jobs[0].compute_flop: 'Infinity': input should be a valid number"),
        (("jobs", 0, "compute_s"), "1", "jobs[0].compute_s: '1': input should be a valid number"),
        (("jobs", 0, "compute_s"), True, "jobs[0].compute_s: True: input should be a valid number"),
        (("jobs", 0, "gpus"), True, "jobs[0].gpus: True: input should be a valid integer"),
        (("jobs", 0, "gpus"), "10", "jobs[0].gpus: '10': input should be a valid integer"),
        (("jobs", 0, "lockstep"), 1, "jobs[0].lockstep: 1: input should be a valid boolean"),
        (("jobs", 0, "flows", 0, "bytes"), "2", "jobs[0].flows[0].bytes: '2': input should be a valid number"),
        (("nodes", 0, "count"), True, "cluster.json: nodes[0].count: True: input should be a valid integer"),
        (("links", 1, "latency_us"), "0", "cluster.json: links[1].latency_us: '0': input should be a valid number"),
        (("jobs", 0, "overlap_start"), 2, "jobs[0].overlap_start: 2: input should be less than or equal to 1"),
        (("jobs", 0, "communication_s"), 0, "jobs[0].communication_s: 0: input should be greater than 0"),
        (("jobs", 0, "lockstep"), "perhaps", "jobs[0].lockstep: 'perhaps': input should be a valid boolean"),
        (("jobs", 1, "name"), "one", "jobs[1].name: 'one': another job has this name"),
        (("jobs", 1, "flows", 0, "to"), "z", "jobs[1].flows[0].to: no node is named 'z'; there are a, b, c"),
        (("jobs", 1, "flows", 0), {"from": "a", "bytes": 1}, "jobs[1].flows[0].to: missing"),
        (("jobs", 1, "flows"), 3, "jobs[1].flows: 3: input should be a valid list"),
        (("jobs", 1, "colour"), 3, "jobs[1].colour: no such field; the fields of a job file are in docs/priorities.md"),
        (("jobs", 1), "x", "jobs[1]: 'x': input should be"),
        (("jobs",), [], "jobs: []: list should have at least 1 item"),
        (("links", 1, "bandwidth_gb_per_s"), 0, "cluster.json: links[1].bandwidth_gb_per_s: 0"),
        (("links",), [], "jobs[0].flows[0]: no path from node a to node b"),
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
    cluster = clos(1, 1, 1, 1, 1)
    with pytest.raises(PlanningError, match=r"nowhere\.yaml: it cannot be read"):
        job_file.load(tmp_path / "nowhere.yaml", cluster)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(PlanningError, match=r"broken\.json: neither YAML nor JSON"):
        job_file.load(tmp_path / "broken.json", cluster)


def test_the_example() -> None:
    directory = Path(__file__).parents[3] / "examples" / "priorities"
    cluster = cluster_file.load(directory / "cluster.yaml")
    jobs = job_file.load(directory / "jobs.yaml", cluster)
    assert [job.gpus for job in jobs] == [16, 8, 8, 12, 4] and jobs[0].flows[0].size_bytes == 20e9
    arguments = ["priorities", str(directory / "jobs.yaml"), "--cluster", str(directory / "cluster.yaml")]
    result = CliRunner().invoke(app, [*arguments, "--levels", "3", "--simulate", "60.1"])
    assert result.exit_code == 0
    documented = (directory.parents[1] / "docs" / "priorities.md").read_text()
    assert "\n".join(line.strip() for line in result.output.strip().splitlines()) in documented


def test_the_schema_names_the_fields() -> None:
    assert set(job_file.json_schema()["$defs"]["_Job"]["properties"]) == {
        *("name", "gpus", "compute_flop", "compute_s", "overlap_start", "communication_s", "lockstep", "flows")
    }


def test_the_planner_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys\nfrom triton_ext.planner.jobs import baselines, exhaustive, report\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'triton', 'triton_ext.runtime')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
