"""Plans, what they cost and need, and what was left out, as text and tables for a terminal."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cluster import Cluster
from .pipeline import Step
from .plan import ParallelPlan, Stage
from .result import CostedPlan, Rejected, SearchResult
from .schedule import layer_runs

_GIB = 1 << 30
_BAR = 24  # characters
_FULL = 0.9  # of its memory, from where on a device's bar is a warning


@dataclass(frozen=True)
class Simulated:
    """A costed plan and what the simulator makes of it."""

    costed: CostedPlan
    step: Step

    @property
    def plan(self) -> ParallelPlan:
        return self.costed.plan

    @property
    def simulated_ms(self) -> float:
        return self.step.step_time_s * 1e3


def stage_devices(stage: Stage, cluster: Cluster) -> str:
    """As in "4 A100-40 + 2 V100-16, dp 3, tp 2"."""
    return f"{_types(stage, cluster)}, dp {stage.dp}, tp {stage.tp}"


def layers(plan: ParallelPlan, stage: int) -> str:
    """As in "layers 0-3, 16-19": those of a stage, by chunk."""
    runs = [(begin, end) for begin, end in layer_runs(plan)[stage] if begin < end]
    parts = [str(begin) if end == begin + 1 else f"{begin}-{end - 1}" for begin, end in runs]
    return f"layer{'s' if sum(end - begin for begin, end in runs) > 1 else ''} {', '.join(parts)}"


def milliseconds(value: float) -> str:
    """With its unit, and without an exponent."""
    return f"{value:.4g} ms" if value < 9999.5 else f"{value / 1e3:.4g} s"


def cluster_line(cluster: Cluster) -> str:
    """As in "16 devices (8 A100-40, 8 V100-16) on 4 nodes"."""
    counts = Counter(device.type for device in cluster.devices)
    parts = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{_count(len(cluster.devices), 'device')} ({parts}) on {_count(len(cluster.nodes), 'node')}"


def outcome(result: SearchResult) -> str:
    """How good the best plan is known to be."""
    searched = f"{result.costed:,} plans costed in {result.elapsed_s:.2f} s"
    if result.best is None:
        why = "every plan of the space was rejected"
        if not result.complete:
            why = "the time limit came first" if result.timed_out else "none was found, but not all were tried"
        return f"no plan: {why} ({searched})"
    if result.proven:
        return f"optimum, proven ({searched})"
    limit = "; stopped at the time limit" if result.timed_out else ""
    if not result.complete and not result.timed_out and result.lower_bound_ms is not None:
        limit = "; stopped at the limit of plans that are priced"
    if result.lower_bound_ms:
        bound = (
            f"at most {result.gap:.1%} above the optimum: no plan costs less than {milliseconds(result.lower_bound_ms)}"
        )
        return f"{bound} ({searched}{limit})"
    if result.lower_bound_ms is not None:
        return f"best found; how far from the optimum is not known ({searched}{limit})"
    return f"best found; this algorithm proves nothing ({searched}{limit})"


def plans(found: Sequence[Simulated], cluster: Cluster) -> Table:
    """The best plans: cost by the search's model and by simulation."""
    table = Table(title="Best plans")
    for name in ("", "cost (ms)", "simulated (ms)", "samples/s", "stages", "micro-batches"):
        table.add_column(name, justify="right")
    table.add_column("layers and devices of each stage")
    for rank, each in enumerate(found, 1):
        plan, total_ms = each.plan, each.costed.cost.total_ms
        table.add_row(
            str(rank),
            f"{total_ms:.5g}",
            f"{each.simulated_ms:.5g}" + (f" ({_change(each.simulated_ms / total_ms)})" if total_ms else ""),
            f"{plan.global_batch / each.step.step_time_s:.4g}" if each.step.step_time_s else "",
            str(len(plan.stages)),
            f"{plan.microbatches} of {plan.microbatch_samples}",
            "\n".join(_runs(plan, cluster)) + _unmeasured_mark(each.costed),
        )
    return table


def stages(best: Simulated, cluster: Cluster) -> Table:
    """The best plan's stages: their devices, the samples of a micro-batch that each replica has, their times."""
    plan, step = best.plan, best.step
    table = Table(title="Stages of the best plan")
    for name in ("stage", "layers", "devices"):
        table.add_column(name)
    for name in ("dp", "tp", "samples", "micro-batch (ms)", "computing", "waiting for data"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        shares = [replica.samples for replica in stage.replicas]
        slowest = max(stage.devices, key=lambda device: step.compute_s[device])
        table.add_row(
            str(number),
            layers(plan, number).partition(" ")[2],
            f"{_types(stage, cluster)}: {_numbers(stage.devices)}",
            str(stage.dp),
            str(stage.tp),
            str(shares[0]) if len(shares) == 1 else _shares(shares),
            f"{best.costed.stage_ms[number]:.4g}" if best.costed.stage_ms else "",
            _share(step.compute_s[slowest], step.step_time_s),
            _share(step.exposed_communication_s[slowest], step.step_time_s),
        )
    return table


def memory(best: Simulated, cluster: Cluster) -> Table:
    """What each device needs at its fullest, by simulation, against what it has. Equal devices share a row."""
    table = Table(title="Memory of the best plan")
    for name in ("stage", "devices", ""):
        table.add_column(name)
    table.add_column("needed (GiB)", justify="right")
    table.add_column("of (GiB)", justify="right")
    for number, stage in enumerate(best.plan.stages):
        groups: dict[tuple[str, int], list[int]] = {}
        for device in stage.devices:
            key = (cluster.devices[device].type, best.step.peak_memory_bytes[device])
            groups.setdefault(key, []).append(device)
        for (name, needed), devices in groups.items():
            limit = cluster.device_type(name).memory_bytes
            table.add_row(
                str(number),
                f"{len(devices)} {name}: {_numbers(devices)}",
                bar(needed / limit),
                f"{needed / _GIB:.1f}" if needed >= _GIB / 10 else f"{needed / _GIB:.2g}",
                f"{limit / _GIB:.0f} ({needed / limit:.0%})",
            )
    return table


def unused(plan: ParallelPlan, cluster: Cluster) -> str | None:
    """The devices that a plan leaves out; None if it uses all."""
    used = {device for stage in plan.stages for device in stage.devices}
    left = [device.index for device in cluster.devices if device.index not in used]
    if not left:
        return None
    types = ", ".join(f"{n} {name}" for name, n in Counter(cluster.devices[device].type for device in left).items())
    return f"left unused: {types} (device{'s' if len(left) > 1 else ''} {_numbers(left)})"


def bar(share: float) -> Text:
    """A bar for a share of a limit: green, yellow from 90 % on, red above it."""
    filled = min(round(share * _BAR), _BAR)
    colour = "red" if share > 1 else "yellow" if share >= _FULL else "green"
    return Text.assemble(("█" * filled, colour), ("░" * (_BAR - filled), "dim"))


def rejected(result: SearchResult) -> RenderableType:
    """What cannot be, counted by reason, and what was left out."""
    parts: list[RenderableType] = []
    if result.rejected:
        table = Table(title="What cannot be")
        table.add_column("reason")
        table.add_column("count", justify="right")
        table.add_column("for instance")
        for reason in _by_count(result.rejected):
            table.add_row(reason.code, f"{reason.count:,}", reason.example)
        parts.append(table)
    if any(result.pruned.values()):
        rules = ", ".join(f"{name} {count:,}" for name, count in sorted(result.pruned.items()) if count)
        parts.append(Text(f"left out, by rule: {rules}"))
    return Group(*parts)


def hints(result: SearchResult, model_missing: bool, not_allowed: Iterable[str]) -> list[str]:
    """What may help where there is no plan, by the reasons."""
    codes = {reason.code for reason in result.rejected}
    found = []
    if result.timed_out:
        found.append("hint: a longer --time-limit")
    if any(code.startswith("profile") for code in codes) and not model_missing:
        found.append("hint: profile what is missing, or take it from a roofline with --modelled")
    savers = sorted({"recompute", "shard-optimizer", "shard-parameters"} & set(not_allowed))
    if "memory" in codes and result.algorithm != "metis" and savers:
        found.append(f"hint: less memory with --allow {', --allow '.join(savers)}")
    return found


def unmeasured(best: CostedPlan) -> list[str]:
    """What the plan's figures rest on that nobody measured."""
    found = []
    for what, points in (("interpolated", best.interpolated), ("modelled, not measured", best.modelled)):
        if points:
            found.append(f"{what}: {'; '.join(points)} (device type, tp, micro-batch)")
    return found or ["every profile point that the best plan uses was measured"]


def speed_ups(best: CostedPlan, others: Mapping[str, CostedPlan | None]) -> Table:
    """The best plan against plans found otherwise, by name; None where that finds no plan."""
    table = Table(title="Against simpler planning")
    table.add_column("")
    table.add_column("cost (ms)", justify="right")
    table.add_column("speed-up of the best plan", justify="right")
    for name, other in others.items():
        if other is None:
            table.add_row(name, "no plan", "")
        else:
            ratio = other.cost.total_ms / best.cost.total_ms if best.cost.total_ms else float("nan")
            table.add_row(name, f"{other.cost.total_ms:.5g}", f"{ratio:.2f}")
    return table


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.0%}" if whole_s else ""


def _change(ratio: float) -> str:
    return f"{round(ratio - 1, 3) + 0.0:+.1%}"  # no -0.0


def _by_count(reasons: Sequence[Rejected]) -> list[Rejected]:
    return sorted(reasons, key=lambda reason: (-reason.count, reason.code))


def _runs(plan: ParallelPlan, cluster: Cluster) -> list[str]:
    """A line for each run of stages on equal devices."""
    lines = []
    for devices, members in itertools.groupby(plan.stages, key=lambda stage: stage_devices(stage, cluster)):
        run = list(members)
        cuts = "|".join(str(stage.end - stage.begin) for stage in run)
        each = ", each" if len(run) > 1 else ""
        lines.append(f"{cuts} layer{'s' if cuts != '1' else ''}{each} on {devices}")
    return lines


def _unmeasured_mark(costed: CostedPlan) -> str:
    kinds = [name for name in ("interpolated", "modelled") if getattr(costed, name)]
    return f"\n(with {' and '.join(kinds)} points)" if kinds else ""


def _types(stage: Stage, cluster: Cluster) -> str:
    counts = Counter(cluster.devices[device].type for device in stage.devices)
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def _shares(shares: Sequence[int]) -> str:
    """Samples of the replicas, as in "4 of 2 + 1"."""
    runs = [(value, len(list(members))) for value, members in itertools.groupby(shares)]
    return " + ".join(f"{count} of {value}" if count > 1 else str(value) for value, count in runs)


def _numbers(values: Sequence[int]) -> str:
    """Sorted numbers with ranges: 0-3, 8."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(values)), key=lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
