"""How good the planner's choices are: every schedule that plans can run, timed, against the one that is chosen.

Cases are those of the sweep that leave a choice: all_reduce in one shot or two within a host, and between two emulated
hosts (docs/hosts.md; needs root) the number of slices, and shots. Prints a Markdown table, and how long a decision
takes; writes results/schedules.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from bench import environment

HERE = Path(__file__).parent
_TIMEOUT_S = 1200
_CLOSE = 1.10  # of the best measured time: as good as it
_SAMPLE_S = 0.02

Record = dict[str, Any]


def main(
    worlds: Annotated[str, typer.Option(help="Numbers of ranks of one host, separated by commas.")] = "2,4",
    rate_mbps: Annotated[int, typer.Option(help="Of the links between two hosts; 0: no hosts.")] = 1000,
    runs: Annotated[int, typer.Option(help="Samples of each schedule.")] = 9,
    output: Annotated[Path, typer.Option(help="Directory for schedules.json.")] = Path("results"),
) -> None:
    """Measure, and report."""
    output.mkdir(parents=True, exist_ok=True)
    latency = decision_latency()
    print("\n".join(f"a decision, {name}: {us:.3g} us" for name, us in latency.items()), flush=True)
    records = [record for world in worlds.split(",") if world for record in _on_one_host(int(world), runs)]
    if rate_mbps:
        records += _on_two_hosts(rate_mbps, runs)
    print("\n" + markdown(records) + "\n\n" + summary(records))
    found = {"environment": environment(), "decision_us": latency, "records": records}
    (output / "schedules.json").write_text(json.dumps(found, indent=1))
    print(f"\nwritten: {output / 'schedules.json'}")


def decision_latency() -> dict[str, float]:
    """Medians, in microseconds: cold, for bytes never asked for before, and for a request that is known."""
    from triton_ext.planner import presets
    from triton_ext.planner.schedules import ON_CPU, Request, choose

    def median_us(call: Callable[..., Any], times: int) -> float:
        seconds = []
        for number in range(times):
            start = time.perf_counter()
            call(number)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds) * 1e6

    found = {}
    for ranks in ([2], [8], [4, 4]):
        cluster, name = presets.cpu_hosts(ranks), f"{'+'.join(map(str, ranks))} ranks"
        all_schedules = Request("all_reduce", 1 << 20, "float32", 256, 1e-6, tuple(range(sum(ranks))), costs=ON_CPU)
        of_a_plan = replace(
            all_schedules, executable=frozenset({"one_shot", "two_shot"}), slices=(8,), orders=("remote_first",)
        )
        for what, request, times in (("all schedules", all_schedules, 5), ("a plan's two schedules", of_a_plan, 50)):
            fresh = [replace(request, tensor_bytes=(1 << 20) + 4 * number) for number in range(times + 1)]
            choose(fresh.pop(), cluster)  # the first one builds the schedules and the routes
            found[f"{name}, {what}, a new number of bytes"] = median_us(
                lambda number, fresh=fresh, cluster=cluster: choose(fresh[number], cluster), times
            )
        found[f"{name}, warm"] = median_us(
            lambda _, request=all_schedules, cluster=cluster: choose(replace(request), cluster), 1000
        )
    return found


def markdown(records: list[Record]) -> str:
    """A line per case. Noise: how far apart two halves of the chosen one's samples are."""
    lines = [
        "| ranks | case | chosen | its median ms | best measured | its median ms | chosen / best | noise | all (ms) |",
        "|---|---|---|---:|---|---:|---:|---:|---|",
    ]
    for record in records:
        chosen, best = record["chosen"], _best(record)
        medians = {name: statistics.median(ms) for name, ms in record["samples_ms"].items()}
        everything = ", ".join(f"{name} {ms:.3g}" for name, ms in medians.items())
        lines.append(
            f"| {record['place']} | {record['case']} | {chosen} | {medians[chosen]:.3g} | {best} | {medians[best]:.3g} "
            f"| {medians[chosen] / medians[best]:.2f} | {_noise(record):.2f} | {everything} |"
        )
    return "\n".join(lines)


def summary(records: list[Record]) -> str:
    lines = []
    for name in ("one host", "two hosts", ""):
        some = [record for record in records if name in record["place"]]
        if some:
            close = sum(_ratio(record) <= _CLOSE for record in some)
            worst = max(map(_ratio, some))
            lines.append(
                f"{name or 'all'}: the chosen schedule is within 10 % of the best measured one in {close} of "
                f"{len(some)} cases ({close / len(some):.0%}); at worst {worst:.2f}"
            )
    return "\n".join(lines)


def _best(record: Record) -> str:
    return min(record["samples_ms"], key=lambda name: statistics.median(record["samples_ms"][name]))


def _ratio(record: Record) -> float:
    samples = record["samples_ms"]
    return statistics.median(samples[record["chosen"]]) / statistics.median(samples[_best(record)])


def _noise(record: Record) -> float:
    """The larger over the smaller of the medians of every other sample of the chosen schedule."""
    samples = record["samples_ms"][record["chosen"]]
    halves = statistics.median(samples[::2]), statistics.median(samples[1::2])
    return max(halves) / min(halves)


def _on_one_host(world: int, runs: int) -> list[Record]:
    with tempfile.TemporaryDirectory() as scratch:
        settings = _settings(scratch, world, runs, f"{world} on one host")
        command = [sys.executable, str(Path(__file__)), "worker"]
        processes = [
            subprocess.Popen(command, env=os.environ | _variables(settings) | {"RANK": str(rank)})
            for rank in range(world)
        ]
        try:
            codes = [process.wait(_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise typer.Exit(1)
        return json.loads(Path(settings["records"]).read_text())


def _on_two_hosts(rate_mbps: int, runs: int) -> list[Record]:
    from triton_ext.emulate import Hosts
    from triton_ext.errors import HostsError

    try:
        with Hosts(2, f"{rate_mbps}mbit") as hosts, tempfile.TemporaryDirectory() as scratch:
            settings = _settings(scratch, 2, runs, f"2 on two hosts, {rate_mbps} Mbit/s")
            commands = [
                ["env", f"RANK={rank}", sys.executable, str(Path(__file__)), "worker"] for rank in range(len(hosts))
            ]
            cores = [[rank % (os.cpu_count() or 1)] for rank in range(len(hosts))]
            statuses = hosts.run(commands, cores=cores, environment=_variables(settings), timeout_s=_TIMEOUT_S)
            if any(statuses):
                raise typer.Exit(1)
            return json.loads(Path(settings["records"]).read_text())
    except HostsError as error:
        print(f"two hosts are left out: {error}")
        return []


def _settings(scratch: str, world: int, runs: int, place: str) -> dict[str, Any]:
    files = {"records": str(Path(scratch, "records.json")), "store": str(Path(scratch, "store"))}
    return {"world": world, "runs": runs, "place": place, **files}


def _variables(settings: dict[str, Any]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", "BENCH": json.dumps(settings)}


def worker() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    settings, rank = json.loads(os.environ["BENCH"]), int(os.environ["RANK"])
    store = dist.FileStore(settings["store"], settings["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings["world"])
    import triton_ext as tx

    tx.init()
    torch.manual_seed(rank)
    between_hosts = "two hosts" in settings["place"]
    records = []
    for name, make in _cases(between_hosts):
        record = _measured(make(), settings["runs"], between_hosts)
        records.append({"place": settings["place"], "case": name, **record})
        if rank == 0:
            print(markdown(records[-1:]).splitlines()[-1], flush=True)
    if rank == 0:
        Path(settings["records"]).write_text(json.dumps(records))
    tx.shutdown()
    dist.barrier()
    dist.destroy_process_group()


class Run(NamedTuple):
    """A plan, a call that runs the kernel with it and returns the result, and one that computes alone."""

    plan: Any
    fused: Callable[[], Any]
    alone: Callable[[], Any]


Make = Callable[..., Run]  # takes options of a plan


def _cases(between_hosts: bool) -> list[tuple[str, Callable[[], Make]]]:
    """Names, and what makes a case's tensors."""
    found: list[tuple[str, Callable[[], Make]]] = []
    for b, n in [*((b, 8192) for b in (1, 2, 4, 8, 16)), (1, 2048), (1, 4096)]:
        found.append((f"gemv_all_reduce B {b}, N {n}, K {n}", partial(_gemv, b, n, n)))
    if between_hosts:
        for k in (512, 1024, 2048):
            found.append((f"gemm_all_to_all M 1024, N 1024, K {k}", partial(_gemm, 1024, 1024, k)))
        name = "embedding_all_to_all tables 64, samples 2048, D 64, lookups 32"
        found.append((name, partial(_embedding, 64, 2048, 64, 32)))
    return found


def _gemv(batch: int, n: int, k: int) -> Make:
    import torch
    import torch.distributed as dist

    import triton_ext as tx
    from kernels import gemv_kernel
    from triton_ext.ops import gemv

    depth = k // dist.get_world_size()
    x, w, local = torch.randn(batch, depth), torch.randn(n, depth), torch.empty(batch, n)
    constants = gemv.configuration(batch, x.device)

    def make(**options: Any) -> Run:
        plan = tx.all_reduce((batch, n), torch.float32, **options)
        arguments = (x, w, local, batch, n, depth, *x.stride(), *w.stride())
        grid = plan.grid(constants["BB"], constants["BN"])
        return Run(plan, lambda: gemv.run(x, w, plan), lambda: gemv_kernel[grid](*arguments, **constants))

    return make


def _gemm(m: int, n: int, k: int) -> Make:
    import torch

    import triton_ext as tx
    from kernels import gemm_kernel
    from triton_ext.ops import gemm

    a, b, local = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    constants = gemm.configuration(m, n, k, a.device, between_hosts=True)

    def make(**options: Any) -> Run:
        plan = tx.all_to_all((m, n), torch.float32, **options)
        arguments = (a, b, local, m, n, k, *a.stride(), *b.stride())
        grid = plan.grid(constants["BM"], constants["BN"])
        return Run(plan, lambda: gemm.run(a, b, plan), lambda: gemm_kernel[grid](*arguments, **constants))

    return make


def _embedding(tables: int, samples: int, dim: int, lookups: int, rows: int = 10_000) -> Make:
    import torch

    import triton_ext as tx
    from kernels import embedding_kernel
    from triton_ext.ops import embedding

    weight, starts = torch.randn(tables * rows, dim), torch.arange(tables) * rows
    indices = torch.randint(0, rows, (tables * samples * lookups,))
    offsets = (torch.arange(tables * samples) * lookups).view(tables, samples)
    bags, local = (weight, starts, indices, offsets), torch.empty(samples, tables, dim)
    constants = embedding.configuration(dim, weight.device)

    def make(**options: Any) -> Run:
        plan = tx.all_to_all((samples, tables, dim), torch.float32, split_dim=0, concat_dim=1, **options)
        arguments = (*bags, local, samples, tables, dim, indices.numel(), dim)
        grid = plan.grid(constants["BB"], 1, constants["BD"])
        return Run(
            plan,
            lambda: tx.ops.embedding_all_to_all(*bags, plan=plan),
            lambda: embedding_kernel[grid](*arguments, MEAN=False, **constants),
        )

    return make


def _measured(make: Make, runs: int, between_hosts: bool) -> Record:
    """Every schedule in turn, on all ranks at once; results must agree with the first one's."""
    from measure import _sample

    first_run = make()
    compute_s = statistics.median(_sample(first_run.alone, 3) for _ in range(5))
    first_run.plan.free()
    open_run = make(compute_s=compute_s)
    decision = open_run.plan.explain()
    open_run.plan.free()
    is_sum = decision.request.collective == "all_reduce"
    slices: Sequence[int | None] = decision.request.slices if between_hosts else (None,)
    chosen = (decision.choice.schedule, decision.choice.slices if between_hosts else None)
    wanted = [(schedule, count) for schedule in ("one_shot", "two_shot")[: 1 + is_sum] for count in slices]
    if is_sum and between_hosts:  # every other number of slices will do, and the chosen one
        wanted = [each for number, each in enumerate(wanted) if number % 2 == 0 or each == chosen]
    made = {}
    for schedule, count in wanted:
        options = {"shots": 1 if schedule == "one_shot" else 2} if is_sum else {}
        made[_name(schedule, count)] = make(slices=count, **options)
    calls = {name: run.fused for name, run in made.items()}
    first = next(iter(calls.values()))().clone()
    for name, call in calls.items():
        error = float((call() - first).abs().max() / first.abs().max())
        if not error < 1e-5:
            raise RuntimeError(f"{name} differs from {next(iter(calls))} by {error:.2g}")
    counts = {name: max(1, int(_SAMPLE_S / _sample(call, 2))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for run in range(runs):
        for name in [*names[run % len(names) :], *names[: run % len(names)]]:
            samples[name].append(_sample(calls[name], counts[name]) * 1e3)
    for each in made.values():
        each.plan.free()
    predicted_ms = {_name(c.choice.schedule, c.choice.slices if between_hosts else None): c.total_s * 1e3
                    for c in decision.candidates}  # fmt: skip
    return {
        "chosen": _name(*chosen),
        "compute_ms": compute_s * 1e3,
        "samples_ms": samples,
        "predicted_ms": predicted_ms,
    }


def _name(schedule: str, slices: int | None) -> str:
    return schedule if slices is None else f"{schedule}/{slices}"


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        worker()
    else:
        typer.run(main)
