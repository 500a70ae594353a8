"""Profiles in files: both layouts, what they lack, and what is said about it."""

import copy
import json
import random

import pytest

from metis_table import MIB, metis_profiles, shared_profiles
from triton_ext.errors import PlanningError
from triton_ext.planner.parallel import profile_files
from triton_ext.planner.parallel.profiles import Gap, Model, Point, Profiles

DOCUMENT = {
    "model": {
        "model_name": "small",
        "num_layers": 3,
        "parameters": {
            "total_parameters_bytes": 3000,
            "parameters_per_layer_bytes": [1000, 1000, 1000],
            "activation_parameters_bytes": [64, 64, 4],
        },
    },
    "execution_time": {
        "total_time_ms": 14.0,
        "forward_backward_time_ms": 12.0,
        "batch_generator_time_ms": 0.5,
        "layernorm_grads_all_reduce_time_ms": 0.1,
        "embedding_grads_all_reduce_time_ms": 0.1,
        "optimizer_time_ms": 2.0,
        "layer_compute_total_ms": [1.0, 9.0, 2.0],
    },
    "execution_memory": {"total_memory_mb": 6.0, "layer_memory_total_mb": [1.0, 3.0, 2.0]},
}


def document(change=None, samples=1):
    made = copy.deepcopy(DOCUMENT)
    made["model"]["parameters"]["activation_parameters_bytes"] = [64 * samples, 64 * samples, 4 * samples]
    made["execution_memory"]["layer_memory_total_mb"] = [1.0, 2.0 + samples, 2.0]
    if change:
        change(made)
    return made


def put(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def write_pair(folder, change=None):
    for samples in (1, 2):
        put(folder, f"DeviceType.GPU_X_tp1_bs{samples}.json", document(change, samples))


def texts(notes):
    return [str(note) for note in notes]


def test_metis_layout(tmp_path):
    write_pair(tmp_path)
    profiles, notes = profile_files.read(tmp_path)
    assert not notes
    assert profiles.model == Model("small", (1000, 1000, 1000), (64, 64, 4))
    point = profiles.points["GPU_X", 1, 2]
    assert point.layer_ms == (1.0, 9.0, 2.0) and point.optimizer_ms == 2.0 and point.batch_generator_ms == 0.5
    assert point.memory_bytes == (MIB, 4 * MIB, 2 * MIB)
    assert point.activation_memory_bytes == (0, 2 * MIB, 0)  # one MiB a sample


def test_folders_by_device_type(tmp_path):
    for tp in (1, 2):
        for samples in (1, 2):
            made = document(samples=samples)
            made["model"]["parameters"]["parameters_per_layer_bytes"] = [100 + 900 // tp, 1000 // tp, 1000 // tp]
            put(tmp_path, f"small/A-1/mbs{samples}_tmp{tp}.json", made)
    profiles, _ = profile_files.read(tmp_path)
    assert set(profiles.points) == {("A-1", tp, samples) for tp in (1, 2) for samples in (1, 2)}
    assert profiles.model.parameter_bytes == (1000, 1000, 1000)
    assert profiles.shard_bytes(("A-1", 2, 1)) == (550, 500, 500)
    same, _ = profile_files.read(tmp_path / "small")
    assert same == profiles


@pytest.mark.parametrize("degrees", [(2, 4), (4, 2)])
def test_the_whole_layer_follows_from_two_shards(tmp_path, degrees):
    for tp in degrees:
        made = document()
        made["model"]["parameters"]["parameters_per_layer_bytes"] = [100 + 900 // tp, 1000 // tp, 1000 // tp]
        put(tmp_path, f"small/A/mbs1_tmp{tp}.json", made)
    profiles, notes = profile_files.read(tmp_path)
    assert profiles.model.parameter_bytes == (1000, 1000, 1000)
    assert any("shards of tp 2 and 4" in text for text in texts(notes))


def test_the_whole_layer_of_one_shard(tmp_path):
    put(tmp_path, "small/A/mbs1_tmp4.json", document())
    profiles, notes = profile_files.read(tmp_path)
    assert profiles.model.parameter_bytes == (4000, 4000, 4000)
    assert profiles.shard_bytes(("A", 4, 1)) == (1000, 1000, 1000)
    assert any("taken as 4 times it" in text for text in texts(notes))
    put(tmp_path, "flat/DeviceType.A_tp4_bs1.json", document())
    assert profile_files.read(tmp_path, "flat")[0].model.parameter_bytes == (1000, 1000, 1000)


def test_written_and_read_again(tmp_path):
    made = metis_profiles(slower={"T_4": 3.3})
    profile_files.write(made, tmp_path / "a")
    again, _ = profile_files.read(tmp_path / "a")
    assert set(again.points) == set(made.points) and again.model == made.model
    for key, point in made.points.items():
        assert again.points[key].layer_ms == point.layer_ms and again.points[key].memory_bytes == point.memory_bytes
        assert again.points[key].forward_backward_ms == point.forward_backward_ms
    profile_files.write(again, tmp_path / "b")  # now with what `read` found out about activations
    assert profile_files.read(tmp_path / "b")[0] == again


def test_sources_survive_a_file(tmp_path):
    point = Point((1.0, 2.0), (MIB, MIB + 1), 3.0, 0.5, 0.25, 0.4, (3, 4), (40, 50), "modelled")
    made = Profiles(Model("m", (80, 100), (8, 8)), {("X", 2, 3): point})
    profile_files.write(made, tmp_path)
    assert profile_files.read(tmp_path)[0] == made


def test_nothing_depends_on_the_order_of_files(tmp_path, monkeypatch):
    def one_file_is_different(made):
        made["model"]["parameters"]["parameters_per_layer_bytes"][1] = 1000 + random.randrange(100)

    write_pair(tmp_path, one_file_is_different)
    put(tmp_path, "DeviceType.OTHER_tp1_bs1.json", document(one_file_is_different))
    expected = profile_files.read(tmp_path)
    assert any("differs from" in text for text in texts(expected[1]))
    found = profile_files.Path.rglob

    def shuffled(self, pattern):
        paths = list(found(self, pattern))
        return iter(sorted(paths, reverse=True))

    monkeypatch.setattr(profile_files.Path, "rglob", shuffled)
    assert profile_files.read(tmp_path) == expected


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("execution_time.forward_backward_time_ms", "used the sum of the layers"),
        ("execution_time.batch_generator_time_ms", "taken as 0"),
        ("execution_time.layernorm_grads_all_reduce_time_ms", "missing"),
        ("execution_memory.total_memory_mb", "missing"),
        ("model.num_layers", "missing"),
    ],
)
def test_a_missing_field_is_noted(tmp_path, field, said):
    section, name = field.split(".")
    write_pair(tmp_path, lambda made: made[section].pop(name))
    profiles, notes = profile_files.read(tmp_path)
    assert len(profiles.points) == 2
    (note,) = notes
    assert note.field == field and said in note.text
    assert note.file == "DeviceType.GPU_X_tp1_bs1.json and 1 more"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("execution_time.layer_compute_total_ms", [1.0, "x", 2.0], "list of numbers"),
        ("execution_time.layer_compute_total_ms", [], "list of numbers"),
        ("execution_time.optimizer_time_ms", None, "a number"),
        ("execution_time.optimizer_time_ms", -1, "not negative"),
        ("execution_memory.layer_memory_total_mb", [1.0, 2.0], "has 2 entries, the times have 3"),
        ("model.parameters.parameters_per_layer_bytes", "many", "list of numbers"),
        ("model.model_name", 7, "a name"),
    ],
)
def test_errors_name_file_and_field(tmp_path, field, value, message):
    def change(made):
        *sections, name = field.split(".")
        for section in sections:
            made = made[section]
        made[name] = value

    write_pair(tmp_path, change)
    with pytest.raises(PlanningError) as error:
        profile_files.read(tmp_path)
    assert "DeviceType.GPU_X_tp1_bs1.json" in str(error.value) and field in str(error.value)
    assert message in str(error.value)


def test_a_broken_file_is_named(tmp_path):
    write_pair(tmp_path)
    put(tmp_path, "DeviceType.GPU_X_tp2_bs1.json", '{"model": ')
    with pytest.raises(PlanningError, match=r"DeviceType.GPU_X_tp2_bs1.json: not a JSON file"):
        profile_files.read(tmp_path)


def test_no_profiles_and_several_models(tmp_path):
    with pytest.raises(PlanningError, match="no such folder"):
        profile_files.read(tmp_path / "nothing")
    with pytest.raises(PlanningError, match="no profiles"):
        profile_files.read(tmp_path)
    for model in ("one", "two"):
        put(tmp_path, f"{model}/A/mbs1_tmp1.json", document())
    for model in (None, "three"):
        with pytest.raises(PlanningError, match=r"give one of one, two"):
            profile_files.read(tmp_path, model)
    assert profile_files.read(tmp_path, "two")[0].points


def test_more_parameters_than_times(tmp_path):
    def change(made):
        made["model"]["parameters"]["parameters_per_layer_bytes"].append(7)
        made["execution_memory"]["layer_memory_total_mb"].append(5.0)
        made["model"]["parameters"]["activation_parameters_bytes"].append(8)

    write_pair(tmp_path, change)
    profiles, notes = profile_files.read(tmp_path)
    assert profiles.model.parameter_bytes == (1000, 1000, 1007)
    assert profiles.points["GPU_X", 1, 1].memory_bytes == (MIB, 3 * MIB, 7 * MIB)
    assert sum("4 entries for 3 layers" in text for text in texts(notes)) == 3


def test_memory_that_falls_with_the_batch_is_noted(tmp_path):
    put(tmp_path, "DeviceType.A_tp1_bs1.json", document(samples=4))
    put(tmp_path, "DeviceType.A_tp1_bs2.json", document(samples=1))
    made = profile_files.read(tmp_path, activation_bytes=(64, 64, 4))
    (note,) = [note for note in made[1] if "less than at micro-batch 1" in note.text]
    assert note.file == "A tp 1 micro-batch 2" and "layer 1: 3 after 6" in note.text
    assert made[0].points["A", 1, 2].activation_memory_bytes == (0, 0, 0)


def test_activations_that_no_file_has(tmp_path):
    write_pair(tmp_path, lambda made: made["model"]["parameters"].pop("activation_parameters_bytes"))
    with pytest.raises(PlanningError, match=r"activation_parameters_bytes is missing.*give activation_bytes"):
        profile_files.read(tmp_path)
    with pytest.raises(PlanningError, match="2 entries, the model 3 layers"):
        profile_files.read(tmp_path, activation_bytes=(1, 2))
    assert profile_files.read(tmp_path, activation_bytes=(9, 9, 1))[0].model.activation_bytes == (9, 9, 1)


def test_one_micro_batch_size_only(tmp_path):
    write_pair(tmp_path)
    put(tmp_path, "DeviceType.Z_tp1_bs1.json", document())
    put(tmp_path, "DeviceType.Z_tp2_bs1.json", document())
    profiles, notes = profile_files.read(tmp_path)
    assert profiles.points["Z", 1, 1].activation_memory_bytes == (0, MIB, 0)  # GPU_X's slope
    assert profiles.points["Z", 2, 1].activation_memory_bytes == tuple(m * MIB - 4 * 500 for m in (1, 3, 2))
    said = {note.file: note.text for note in notes if note.field == "activation memory"}
    assert "GPU_X" in said["Z tp 1 micro-batch 1"] and "4x parameters" in said["Z tp 2 micro-batch 1"]


def test_a_missing_point_is_a_gap():
    profiles = metis_profiles()
    for key, code, said in [
        (("T4", 1, 1), "type", "there are A100-80"),
        (("A100-80", 8, 1), "tp", "there are 1, 2, 4"),
        (("A100-80", 2, 8), "microbatch", "there are 1, 2, 4"),
    ]:
        gap = profiles.point(*key)
        assert isinstance(gap, Gap) and gap.code == code and said in gap.reason and gap.key == key


def test_lists_as_long_as_the_model():
    with pytest.raises(PlanningError, match=r"layer_ms has 1 entries, the model m 2 layers"):
        Profiles(Model("m", (1, 1), (1, 1)), {("X", 1, 1): Point((1.0,), (1, 1), 1.0, 1.0)})


@pytest.mark.parametrize(("model", "count", "layers"), [("OPT-350", 125, 26), ("GPT-Neo-2.7", 43, 34)])
def test_the_public_profiles(model, count, layers):
    profiles, notes = profile_files.read(shared_profiles(), model)
    assert len(profiles.points) == count and profiles.model.layers == layers
    assert {note.field for note in notes} == {
        "execution_time.layernorm_grads_all_reduce_time_ms",
        "execution_time.embedding_grads_all_reduce_time_ms",
        "execution_memory.total_memory_mb",
    }
    for key, point in profiles.points.items():
        # Their memory is 5x the parameters and a part for each sample.
        for memory, activation, shard in zip(
            point.memory_bytes, point.activation_memory_bytes, profiles.shard_bytes(key), strict=True
        ):
            assert memory - activation == pytest.approx(5 * shard, rel=1e-3, abs=MIB / 4)


def test_the_public_profiles_of_35_entries_for_34_layers():
    profiles, notes = profile_files.read(shared_profiles(), "LLAMA-3-8")
    assert profiles.model.layers == 34 and len(profiles.points) == 10
    assert sum("35 entries for 34 layers" in text and "and 9 more" in text for text in texts(notes)) == 3
    assert profiles.microbatches["V100-16", 4] == (1,) and profiles.microbatches["A100-40", 2] == (1,)
