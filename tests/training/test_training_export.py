"""Plans for other programs: what they say, and what is refused (pitfalls 12 to 16 of other planners)."""

import json
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_training_layout import plan

from triton_ext.errors import PlanningError
from triton_ext.training.export import FORMATS, device_mesh, export, megatron, torchtitan

EVEN = plan((1, [([4, 5], 2), ([6, 7], 2)]), (5, [([0, 1], 2), ([2, 3], 2)]), (6, [([8, 9], 2), ([10, 11], 2)]))


def arguments(text):
    return dict(line.split(" ", 1) if " " in line else (line, "") for line in text.splitlines()[1:])


def blocks(layout):
    """The blocks of each stage of Megatron's layout."""
    stages = layout.strip('"').split("|")
    expanded = [re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), stage).replace(",", "") for stage in stages]
    assert expanded[0].startswith("E") and expanded[-1].endswith("L")
    return [stage.count("t") for stage in expanded]


def test_device_mesh_numbers_ranks_by_stage_replica_and_place():
    found = json.loads(export(EVEN, "devicemesh"))
    assert found["mesh"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert found["rank_devices"] == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]
    assert [chunk["layers"] for chunk in found["chunks"]] == [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert found["microbatches"] == 4 and found["samples_per_microbatch_and_replica"] == 2


def test_device_mesh_in_python_is_the_same():
    module = {}
    exec(export(EVEN, "devicemesh-py"), module)
    assert module["RANK_DEVICES"] == device_mesh(EVEN)["rank_devices"]
    assert module["CHUNKS"] == device_mesh(EVEN)["chunks"]
    assert callable(module["make_mesh"])


def test_torchtitan_places_every_module_once():
    found = tomllib.loads(torchtitan(EVEN))
    parallelism = found["parallelism"]
    assert parallelism["pipeline_parallel_degree"] == 3
    assert parallelism["data_parallel_replicate_degree"] == 2 and parallelism["tensor_parallel_degree"] == 2
    assert parallelism["pipeline_parallel_schedule"] == "1F1B"
    assert found["training"]["local_batch_size"] == 8 and parallelism["pipeline_parallel_microbatch_size"] == 2
    names = [name for part in parallelism["module_fqns_per_model_part"] for name in part]
    assert names == ["tok_embeddings", *(f"layers.{i}" for i in range(10)), "norm", "output"]


def test_torchtitan_without_a_pipeline_accumulates_gradients():
    found = tomllib.loads(torchtitan(plan((4, [([0], 3), ([1], 3)]), microbatches=5, shard_parameters=True)))
    assert found["training"] == {"local_batch_size": 3, "global_batch_size": 30}
    assert found["parallelism"]["data_parallel_shard_degree"] == 2
    assert "module_fqns_per_model_part" not in found["parallelism"]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6).filter(lambda sizes: sum(sizes) > 2))
def test_megatron_has_every_layer_whatever_the_partition(sizes):
    found = arguments(megatron(plan(*((size, [([i], 2)]) for i, size in enumerate(sizes)), microbatches=6)))
    assert found["--num-layers"] == str(sum(sizes) - 2)
    expected = list(sizes)
    expected[0] -= 1
    expected[-1] -= 1
    assert blocks(found["--pipeline-model-parallel-layout"]) == expected


def test_megatron_interleaved_lists_chunks_in_the_order_of_execution():
    found = megatron(plan((5, [([0], 1)]), (4, [([1], 1)]), schedule="interleaved", chunks_per_stage=2))
    assert blocks(arguments(found)["--pipeline-model-parallel-layout"]) == [2, 2, 2, 1]


def test_megatron_says_the_settings():
    found = arguments(megatron(plan((4, [([0], 1), ([1], 1)]), recompute_activations=True, shard_optimizer=True)))
    assert found["--recompute-granularity"] == "full" and "--use-distributed-optimizer" in found
    assert "--pipeline-model-parallel-layout" not in found


UNEVEN = plan((3, [([0], 3), ([1], 1)]))
MIXED_DP = plan((3, [([0], 2), ([1], 2)]), (3, [([2], 4)]))
MIXED_TP = plan((3, [([0, 1], 4)]), (3, [([2], 4)]))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    ("refused", "message"),
    [(UNEVEN, "3, 1 samples"), (MIXED_DP, "data-parallel degrees 2, 1"), (MIXED_TP, "tensor-parallel degrees 2, 1")],
)
def test_what_no_format_can_express_is_an_error_that_names_it(to, refused, message):
    with pytest.raises(PlanningError, match=message):
        export(refused, to)


@pytest.mark.parametrize(
    ("to", "refused", "message"),
    [
        ("megatron", plan((3, [([0], 1)]), (3, [([1], 1)]), schedule="gpipe"), "gpipe"),
        ("megatron", plan((3, [([0], 1)]), (3, [([1], 1)]), shard_parameters=True), "shard_parameters with 2 stages"),
        (
            "megatron",
            plan((3, [([0], 1)]), (3, [([1], 1)]), microbatches=5, schedule="interleaved", chunks_per_stage=2),
            "multiple of 2",
        ),
        ("megatron", plan((2, [([0], 1)])), "2 layers"),
        ("torchtitan", plan((3, [([0], 1), ([1], 1)]), shard_optimizer=True), "shard_optimizer"),
        ("tarball", EVEN, "no format 'tarball'; there are devicemesh"),
    ],
)
def test_what_one_format_cannot_express_is_an_error_that_names_it(to, refused, message):
    with pytest.raises(PlanningError, match=message):
        export(refused, to)
