"""What users get wrong: a clear error, status 1 or 2, no traceback, before anything takes long."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triton_ext import outputs
from triton_ext.cli import app
from triton_ext.errors import PlanningError, TritonExtError
from triton_ext.planner import cluster_file, presets
from triton_ext.planner.parallel import plan_file, planning, profile_files
from triton_ext.planner.parallel.profiles import Profiles
from triton_ext.planner.parallel.search import search
from triton_ext.training import command, launch, links, profile

PROFILES = Path(__file__).parents[1] / "examples" / "planner" / "profiles"
TRANSFORMER = "triton_ext.training.transformer:transformer"


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def expensive(monkeypatch):
    """Nothing that takes long may begin."""

    def refuse(*_arguments, **_options):
        raise AssertionError("this takes long")

    for module, name in ((planning, "search"), (profile, "measure"), (launch, "torchrun")):
        monkeypatch.setattr(module, name, refuse)


@pytest.fixture
def plan(tmp_path):
    """A plan file of the example."""
    profiles, _ = profile_files.read(PROFILES)
    cluster = presets.cluster({"A100-40": 2})
    found = search(profiles, cluster, 8)
    inputs = plan_file.inputs(profiles, cluster, 8, planning.Options().record())
    path = tmp_path / "given-plan.json"
    plan_file.dump(plan_file.PlanFile(found.best.plan, profiles.model.name, inputs), path)
    return path


def changed(folder, **fields):
    """The example's profiles of one point on A100-40 with other fields, as {section: {field: value}}."""
    data = json.loads((PROFILES / "DeviceType.A100-40_tp1_bs1.json").read_text())
    for section, values in fields.items():
        data[section] |= values
    folder.mkdir(exist_ok=True)
    (folder / "DeviceType.A100-40_tp1_bs1.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("option", ["-o", "--png"])
@pytest.mark.parametrize("place", ["none/plan.json", "."])
def test_plan_looks_at_its_files_before_it_searches(expensive, tmp_path, option, place):
    code, output = invoke("plan", PROFILES, "--cluster", "A100-40=2", "--batch", 4, option, tmp_path / place)
    assert code == 1 and "cannot be written" in output


def test_plan_refuses_times_that_are_all_0(tmp_path):
    layers = len(json.loads((PROFILES / "DeviceType.A100-40_tp1_bs1.json").read_text())["execution_time"]
                 ["layer_compute_total_ms"])  # fmt: skip
    folder = changed(tmp_path / "zero", execution_time={"layer_compute_total_ms": [0] * layers})
    code, output = invoke("plan", folder, "--cluster", "A100-40=1", "--batch", 4)
    assert code == 1 and "is 0 for every layer" in output


def test_plan_says_that_the_metis_search_has_one_process():
    code, output = invoke(
        "plan", PROFILES, "--cluster", "A100-40=2", "--batch", 4, "--algorithm", "metis", "--processes", 2
    )
    assert code == 1 and "one process, not in 2" in output


def test_a_model_that_is_not_there_is_refused(expensive, tmp_path):
    code, output = invoke("plan", PROFILES, "--cluster", "A100-40=2", "--batch", 4, "--model", "WRONG")
    assert code == 1 and "no profiles of a model 'WRONG'; give one of profiles" in output
    for path in ("one/same", "two/same"):
        (tmp_path / path).mkdir(parents=True)
        changed(tmp_path / path)
    with pytest.raises(PlanningError, match="give one of one/same, two/same"):
        profile_files.read(tmp_path, "same")
    assert profile_files.read(tmp_path, "two/same")[0].points


def test_what_profiles_say_is_not_overridden():
    said, _ = profile_files.read(PROFILES)
    given, notes = profile_files.read(PROFILES, activation_bytes=1)
    assert given.model.activation_bytes == said.model.activation_bytes
    assert any("the activation_bytes given are not used" in str(note) for note in notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-o", "{file}"), "is no folder"),
        (("--device-type", "a/b"), "give one without slashes"),
        (("--device", "foo"), "device 'foo'; give cpu or cuda"),
        (("--device", "cuda:7"), "sees 0 CUDA devices; give cpu"),
        (("--timeout", 0), "a timeout of 0 s"),
        (("--timeout", "nan"), "a timeout of nan s"),
        (("nonsense=1",), "takes no argument 'nonsense'"),
        (("-o", "{broken}"), "not a report of triton-ext profile"),
        (("-o", "{empty}"), "it has no model; measure again"),
        (("-o", "{other}"), "another folder"),
    ],
)
def test_profile_refuses_before_it_measures(expensive, tmp_path, options, message, monkeypatch):
    monkeypatch.setattr(profile.torch.cuda, "device_count", lambda: 0)
    other = {"model": "x:y", "arguments": {}, "model_sha256": "0" * 64}
    texts = {"broken": "{", "empty": "{}", "other": json.dumps(other)}
    places = {"file": tmp_path / "file"}
    places["file"].write_text("")
    for name, text in texts.items():
        places[name] = tmp_path / name
        places[name].mkdir()
        (places[name] / "profile.A.json").write_text(text)
    given = [str(option).format(**places) for option in options]
    if "-o" not in given:
        given += ["-o", str(tmp_path / "new")]
    code, output = invoke("profile", TRANSFORMER, "width=16", "heads=2", *given)
    assert code == 1 and message in " ".join(output.split())


@pytest.mark.parametrize(("text", "message"), [("{", "not a report of triton-ext profile"), ("{}", "it has no model")])
def test_run_refuses_reports_that_it_cannot_read(expensive, tmp_path, plan, text, message):
    (tmp_path / "profile.A.json").write_text(text)
    code, output = invoke("run", plan, "--profiles", tmp_path)
    assert code == 1 and message in output


def test_time_limits_that_turn_alarms_off_are_refused(expensive, plan):
    code, output = invoke("run", plan, "--timeout", 0)
    assert code == 1 and "a timeout of 0 s; give more than 0" in output
    with pytest.raises(PlanningError, match="a timeout of -1 s"):
        links.measure([0.5], -1.0)
    code, output = invoke("cpu-cluster", "0.5", "--timeout", 0)
    assert code == 1 and "a timeout of 0 s" in output


def test_outputs_that_cannot_be_written(expensive, tmp_path, plan):
    for arguments in (("export", plan, "--to", "devicemesh"), ("cpu-cluster", "0.5")):
        code, output = invoke(*arguments, "-o", tmp_path / "none" / "file")
        assert code == 1 and "cannot be written: there is no folder" in output
        code, output = invoke(*arguments, "-o", tmp_path)
        assert code == 1 and "cannot be written: it is a folder" in output
    with pytest.raises(TritonExtError, match="the trace cannot be written"):
        outputs.write(tmp_path / "none" / "trace.json", "", "the trace")
    outputs.check_folder(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_no_python(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    code, output = invoke("compile", f"{tmp_path}/x.json:foo", "--target", "cpu")
    assert code == 1 and "not a Python file" in output


def test_a_prediction_completes_points_as_planning_did(tmp_path, monkeypatch):
    """No profile on V100: the plan's points are modelled, and its model and activations are those that it was made
    with."""
    folder = tmp_path / "profiles" / "gpt"
    folder.mkdir(parents=True)
    some = profile_files.read(PROFILES)[0]
    a100 = {k: dataclasses.replace(p, source="measured") for k, p in some.points.items() if k[0] == "A100-40"}
    profile_files.write(Profiles(some.model, a100), folder)
    for path in folder.iterdir():
        data = json.loads(path.read_text())
        del data["model"]["parameters"]["activation_parameters_bytes"]
        path.write_text(json.dumps(data))
    changed(tmp_path / "profiles" / "other")
    (folder / "profile.A.json").write_text(json.dumps({"model": "a:b", "arguments": {}, "model_sha256": "0"}))
    cluster = presets.cluster({"A100-40": 2, "V100-16": 2})
    cluster_file.dump(cluster, tmp_path / "cluster.yaml")
    read_with = ("--model", "gpt", "--activation-bytes", 8388608, "--modelled")
    code, output = invoke("plan", tmp_path / "profiles", *read_with, "--cluster", tmp_path / "cluster.yaml",
                          "--batch", 8, "-o", tmp_path / "plan.json")  # fmt: skip
    assert code == 0, output
    file = plan_file.load(tmp_path / "plan.json")
    assert {cluster.devices[d].type for stage in file.plan.stages for d in stage.devices} == {"A100-40", "V100-16"}

    jobs = []

    def fake(job, timeout_s, report):
        jobs.append(job)
        return (launch.Measured((1.0,), (1.0,)),)

    monkeypatch.setattr(launch, "run", fake)
    quotas = ("--cpu-quota", "1,1,1,1")
    code, output = invoke("run", tmp_path / "plan.json", "--profiles", tmp_path / "profiles", "--cluster",
                          tmp_path / "cluster.yaml", *quotas)  # fmt: skip
    assert code == 0, output
    assert jobs[0].model == "a:b" and "other inputs" not in output
    predicted = command._predicted(file, tmp_path / "profiles", cluster_file.load(tmp_path / "cluster.yaml"), None)
    assert predicted["simulation"] == pytest.approx(file.simulated_ms, rel=1e-6)
    assert predicted["the cost model"] == pytest.approx(file.cost_ms, rel=1e-6)
