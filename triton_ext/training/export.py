"""Parallelism plans for other programs: what a format cannot express is an error, never left out.

All formats number ranks in the order (stage, replica, place in the replica), tensor parallelism innermost, and know one
data-parallel and one tensor-parallel degree for the whole model. `ranks` says which device each rank has to run on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import PlanningError
from ..planner.parallel.plan import ParallelPlan
from . import layout

_SETTINGS = ("recompute_activations", "shard_optimizer", "shard_parameters", "sequence_parallel")


def ranks(plan: ParallelPlan) -> list[int]:
    """The device of each rank."""
    return [device for stage in plan.stages for device in stage.devices]


def device_mesh(plan: ParallelPlan) -> dict[str, Any]:
    """What `torch.distributed.device_mesh.DeviceMesh` takes, and what else the plan says, as JSON types."""
    dp, tp, samples = _uniform(plan, "devicemesh")
    order = ranks(plan)
    return {
        "mesh_dim_names": ["pp", "dp", "tp"],
        "mesh": [
            [[order.index(device) for device in replica.devices] for replica in stage.replicas] for stage in plan.stages
        ],
        "rank_devices": order,
        "degrees": {"pp": len(plan.stages), "dp": dp, "tp": tp},
        "chunks": [{"stage": c.stage, "layers": list(range(c.begin, c.end))} for c in layout.chunks(plan)],
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "samples_per_microbatch_and_replica": samples,
        "settings": {name: getattr(plan.settings, name) for name in _SETTINGS},
    }


def device_mesh_json(plan: ParallelPlan) -> str:
    return json.dumps(device_mesh(plan), indent=2) + "\n"


def device_mesh_python(plan: ParallelPlan) -> str:
    """A module with a function that makes the mesh, and the rest as constants."""
    data = device_mesh(plan)
    mesh, names = data.pop("mesh"), tuple(data.pop("mesh_dim_names"))
    lines = ["from torch.distributed.device_mesh import DeviceMesh", ""]
    lines += [f"{name.upper()} = {value!r}" for name, value in data.items()]
    lines += ["", "", "def make_mesh(device_type: str = 'cuda') -> DeviceMesh:"]
    lines += [f"    return DeviceMesh(device_type, {mesh}, mesh_dim_names={names})"]
    return "\n".join(lines) + "\n"


def torchtitan(plan: ParallelPlan) -> str:
    """TOML for torchtitan's job configuration: `training`, `parallelism` and `activation_checkpoint`.

    Layers are named as in its Llama models: tok_embeddings, layers.N, norm and output.
    """
    dp, tp, samples = _uniform(plan, "torchtitan")
    _ends_apart(plan, "torchtitan")
    if plan.settings.shard_optimizer and not plan.settings.shard_parameters:
        raise PlanningError("torchtitan: shard_optimizer without shard_parameters cannot be expressed")
    stages = len(plan.stages)
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
    sharded = plan.settings.shard_parameters
    lines = [
        f"# {stages * dp * tp} ranks; of rank 0 and on: devices {', '.join(map(str, ranks(plan)))}",
        "[training]",
        # Without a pipeline, micro-batches are steps of gradient accumulation.
        f"local_batch_size = {plan.global_batch // dp if stages > 1 else samples}",
        f"global_batch_size = {plan.global_batch}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if sharded else dp}",
        f"data_parallel_shard_degree = {dp if sharded else 1}",
        f"tensor_parallel_degree = {tp}",
        f"pipeline_parallel_degree = {stages}",
    ]
    if tp > 1 and not plan.settings.sequence_parallel:
        lines.insert(1, "# The plan has no sequence parallelism; torchtitan's tensor parallelism always includes it.")
    if stages > 1:
        lines += [
            f'pipeline_parallel_schedule = "{names[plan.schedule]}"',
            f"pipeline_parallel_microbatch_size = {samples}",
            "module_fqns_per_model_part = [",
            *(f"  {json.dumps(_modules(c.begin, c.end, plan.layers))}," for c in layout.chunks(plan)),
            "]",
        ]
    mode = "full" if plan.settings.recompute_activations else "none"
    return "\n".join([*lines, "", "[activation_checkpoint]", f'mode = "{mode}"']) + "\n"


def megatron(plan: ParallelPlan) -> str:
    """Arguments of Megatron-LM's scripts, one to a line (Megatron-Core 0.13 or later: any layers per stage)."""
    dp, tp, samples = _uniform(plan, "megatron")
    _ends_apart(plan, "megatron")
    stages, settings = len(plan.stages), plan.settings
    if stages > 1 and plan.schedule == "gpipe":
        raise PlanningError("megatron: its schedules are 1F1B, interleaved or not; gpipe cannot be expressed")
    if plan.schedule == "interleaved" and plan.microbatches % stages:
        raise PlanningError(
            f"megatron: an interleaved schedule needs a multiple of {stages} micro-batches, not {plan.microbatches}"
        )
    if settings.shard_parameters and stages > 1:
        raise PlanningError(f"megatron: shard_parameters with {stages} stages cannot be expressed")
    arguments = [
        f"--num-layers {plan.layers - 2}",
        f"--tensor-model-parallel-size {tp}",
        f"--pipeline-model-parallel-size {stages}",
        f"--micro-batch-size {samples}",
        f"--global-batch-size {plan.global_batch}",
    ]
    if stages > 1:
        parts = [_symbols(c.begin, c.end, plan.layers) for c in layout.chunks(plan)]
        arguments.append(f'--pipeline-model-parallel-layout "{"|".join(parts)}"')
    if settings.recompute_activations:
        arguments += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    if settings.shard_parameters:
        arguments += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"]
    elif settings.shard_optimizer:
        arguments.append("--use-distributed-optimizer")
    if settings.sequence_parallel:
        arguments.append("--sequence-parallel")
    head = f"# {stages * dp * tp} ranks, {dp} replicas; of rank 0 and on: devices {', '.join(map(str, ranks(plan)))}"
    return "\n".join([head, *arguments]) + "\n"


FORMATS: dict[str, Callable[[ParallelPlan], str]] = {
    "devicemesh": device_mesh_json,
    "devicemesh-py": device_mesh_python,
    "torchtitan": torchtitan,
    "megatron": megatron,
}


def export(plan: ParallelPlan, to: str) -> str:
    """The plan in a format of `FORMATS`; PlanningError names what it cannot express."""
    if to not in FORMATS:
        raise PlanningError(f"no format {to!r}; there are {', '.join(FORMATS)}")
    return FORMATS[to](plan)


def _uniform(plan: ParallelPlan, where: str) -> tuple[int, int, int]:
    """The degrees of data and tensor parallelism, and a replica's samples, if they are the same everywhere."""
    found = []
    for name, values in (
        ("data-parallel degrees", [stage.dp for stage in plan.stages]),
        ("tensor-parallel degrees", [stage.tp for stage in plan.stages]),
    ):
        if len(set(values)) > 1:
            raise PlanningError(f"{where}: {name} {_listed(values)} of the stages cannot be expressed; one for all can")
        found.append(values[0])
    for number, stage in enumerate(plan.stages):
        samples = [replica.samples for replica in stage.replicas]
        if len(set(samples)) > 1:
            raise PlanningError(
                f"{where}: {_listed(samples)} samples of the replicas of stage {number} cannot be expressed; as many "
                "for each can"
            )
    return found[0], found[1], plan.stages[0].replicas[0].samples


def _ends_apart(plan: ParallelPlan, where: str) -> None:
    if plan.layers < 3:
        raise PlanningError(f"{where}: {plan.layers} layers; it takes an embedding, blocks and a head")


def _modules(begin: int, end: int, layers: int) -> list[str]:
    names: list[str] = []
    for layer in range(begin, end):
        last = layer == layers - 1
        names += ["tok_embeddings"] if layer == 0 else ["norm", "output"] if last else [f"layers.{layer - 1}"]
    return names


def _symbols(begin: int, end: int, layers: int) -> str:
    """E for the embedding, t for each block, L for the head."""
    blocks = min(end, layers - 1) - max(begin, 1)
    middle = "" if blocks < 1 else "t" if blocks == 1 else f"t*{blocks}"
    text = "E" * (begin == 0) + middle
    # The comma ends a multiplier's digits; it is optional everywhere.
    return text + ("," if text and end == layers else "") + "L" * (end == layers)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
