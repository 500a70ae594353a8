"""The `triton-ext` command."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.table import Table

from . import outputs, terminal
from .errors import TritonExtError
from .planner.jobs.command import priorities
from .planner.parallel.command import plan
from .probing.command import probe
from .user_code import import_file, name_values

app = typer.Typer(help="Triton kernels that communicate.", no_args_is_help=True, add_completion=False)
app.command()(plan)
app.command()(priorities)
app.command()(probe)


@app.command()
def compile(
    kernel: Annotated[str, typer.Argument(metavar="FILE:KERNEL", help="A Python file and a @triton.jit kernel in it.")],
    target: Annotated[
        list[str], typer.Option("--target", help="cuda:90, cuda:100, hip:gfx942, hip:gfx950, cpu; may be repeated.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Directory for the stages.")] = Path("compiled"),
    argument: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            metavar="NAME=VALUE",
            help="The type of an argument (*fp32, *bf16:16, i32), a plan (all_to_all:2:fp32) or a constexpr's value. "
            "The file's SIGNATURES, if it has them, say the rest.",
        ),
    ] = None,
) -> None:
    """Compile a kernel for targets that need not be there, and write every stage."""
    from triton.compiler.errors import CompilationError

    from . import aot

    try:
        module, function = _load(kernel)
        arguments = getattr(module, "SIGNATURES", {}).get(function.__name__, {}) | name_values(argument or [])
        for name in target:
            for path in aot.write_stages(function, arguments, name, output):
                print(f"{name}: {path} ({path.stat().st_size} bytes)")
    except (TritonExtError, CompilationError) as error:
        print(f"error: {error}", file=sys.stderr)
        cause = error.__cause__  # Triton's error shows the author's line, and what it was raised from says why
        while isinstance(cause, CompilationError) and cause.__cause__:
            cause = cause.__cause__
        if cause is not None:
            print(cause.error_message if isinstance(cause, CompilationError) else cause, file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def simulate(
    kernel: Annotated[str, typer.Argument(metavar="FILE:KERNEL", help="A Python file and a @triton.jit kernel in it.")],
    world: Annotated[int, typer.Option(help="Number of ranks.", min=1)] = 4,
    seeds: Annotated[int, typer.Option(help="Number of interleavings.", min=1)] = 100,
    seed: Annotated[int | None, typer.Option(help="One interleaving only: the one that a finding names.")] = None,
    runs: Annotated[int, typer.Option(help="Launches in a row.", min=1)] = 2,
    resident: Annotated[
        int | None, typer.Option(help="Programs of a rank under way at once; default: 1, 2 or all.", min=1)
    ] = None,
    partial: Annotated[bool, typer.Option(help="The kernel means to leave elements of the result unwritten.")] = False,
) -> None:
    """Run a kernel's lowered IR for several ranks with many interleavings, and report races, stale reads, deadlocks.

    The file's SIMULATIONS give the arguments: {"kernel": function}, and function(rank, world) returns the kernel's
    arguments on one rank by name, plans among them, and "grid".
    """
    from triton.compiler.errors import CompilationError

    from .simulator import simulate as run

    try:
        module, function = _load(kernel)
        simulations = getattr(module, "SIMULATIONS", {})
        if function.__name__ not in simulations:
            raise TritonExtError(
                f"{kernel}: the file's SIMULATIONS have no entry {function.__name__!r}; add a function(rank, world) "
                "that returns the kernel's arguments by name, plans among them, and its grid"
            )
        arguments = simulations[function.__name__]
        chosen = seeds if seed is None else [seed]
        print(run(function, world, lambda rank: arguments(rank, world), seeds=chosen, runs=runs, resident=resident,
                  partial=partial))  # fmt: skip
    except (TritonExtError, CompilationError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def hosts(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT ARGS…", help="A Python script; put -- before it.")],
    hosts: Annotated[int, typer.Option(help="Number of hosts.", min=1)] = 2,
    rate: Annotated[
        list[str] | None, typer.Option(help="Speed of the links, 1gbit if not given; repeat it to give each host's.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Processes on each host.", min=1)] = 1,
    mtu: Annotated[int, typer.Option(help="Bytes of a packet.")] = 1500,
    cores: Annotated[
        list[str] | None, typer.Option(metavar="0,1", help="The machine's cores that a host has; repeat it per host.")
    ] = None,
) -> None:
    """Run a script with torchrun on several emulated hosts of this machine; exit with the worst status. Needs root."""
    from .emulate import Hosts

    rates = rate or ["1gbit"]
    try:
        with Hosts(hosts, rates[0] if len(rates) == 1 else rates, mtu) as emulated:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts)]
            launcher += ["--nproc-per-node", str(ranks_per_host), "--master-addr", emulated.addresses[0]]
            statuses = emulated.run(
                [[*launcher, "--node-rank", str(host), *script] for host in range(hosts)],
                cores=[_cores(text) for text in cores] if cores else None,
                environment={"PYTHONUNBUFFERED": "1"},
            )
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(max(statuses))


@app.command()
def trace(
    directory: Annotated[Path, typer.Argument(help="What TRITON_EXT_TRACE named.")],
    json: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the timeline of one launch.")] = None,
    launch: Annotated[int, typer.Option(help="The launch to draw; negative ones count from the last.")] = -1,
) -> None:
    """What a recorded run did with its time: computation, communication, how much of it was hidden, waits."""
    from . import timeline

    try:
        if png:
            outputs.check_file(png, "the picture")
        ranks = timeline.load(directory)
        terminal.console(120).print(timeline.table(ranks))
        if json:
            outputs.write(json, timeline.chrome(ranks), "the trace")
        if png:
            timeline.draw(ranks, launch, png)
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def profile(
    model: Annotated[
        str, typer.Argument(metavar="FILE:FUNCTION", help="A function that returns a layered model: docs/training.md.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE…", help="Arguments of it.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the files.")] = Path("profiles"),
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees.")] = "1",
    samples: Annotated[str, typer.Option(help="Samples of a micro-batch.")] = "1,2,4",
    repeats: Annotated[int, typer.Option(help="Samples of each time, of which the median is kept.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="Threads that compute, on a CPU.", min=1)] = 1,
    cpu_quota: Annotated[float, typer.Option(help="Cores that a process may use, for instance 0.25; 0: all.")] = 0.0,
    together: Annotated[
        bool, typer.Option(help="Measure degrees above 1 with as many processes, their communication included.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    device_type: Annotated[str | None, typer.Option(help="Its name in the files; default: what it is.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a group of processes may take.")] = 600.0,
) -> None:
    """Measure a PyTorch model's layers on this device, and write profiles in Metis's format."""
    from .training import command

    with _errors():
        command.profile(
            model, arguments or [], output, degrees=tp, samples=samples, repeats=repeats, threads=threads,
            cpu_quota=cpu_quota, together=together, device=device, device_type=device_type, timeout_s=timeout,
            console=terminal.console(),
        )  # fmt: skip


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="NAME=VALUE…", help="Arguments of the model; put -- before them.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="FILE:FUNCTION; default: the profiles' model.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="Folder of profiles, to predict the step's time.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file; device types cpu-0.25 are quotas.")] = None,
    cpu_quota: Annotated[
        str | None, typer.Option(metavar="0.5,0.25", help="Cores that each device of the plan may use.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 10,
    warmup: Annotated[int, typer.Option(help="Steps before them, not timed.", min=0)] = 2,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    threads: Annotated[int, typer.Option(help="Threads of each rank.", min=1)] = 1,
    check: Annotated[bool, typer.Option(help="Compare a step with one that a single process computes.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is ended.")] = 300.0,
) -> None:
    """Execute a parallelism plan under torchrun on this machine: real training steps, against their prediction."""
    from .training import command

    with _errors():
        command.run(
            plan, arguments or [], model=model, profiles=profiles, cluster=cluster, cpu_quota=cpu_quota, steps=steps,
            warmup=warmup, learning_rate=learning_rate, threads=threads, check=check, timeout_s=timeout,
            console=terminal.console(),
        )  # fmt: skip


@app.command()
def cpu_cluster(
    cpu_quotas: Annotated[str, typer.Argument(metavar="0.5,0.25", help="Cores that each device may use.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The cluster file.")] = Path("cluster.yaml"),
    timeout: Annotated[float, typer.Option(help="Seconds after which everything is ended.")] = 120.0,
) -> None:
    """Make a cluster of this machine's CPU, devices of different speed: measure them and what gloo carries between."""
    from .training import command

    with _errors():
        command.cpu_cluster(cpu_quotas, output, timeout, terminal.console())


@app.command()
def export(
    plan: Annotated[Path, typer.Argument(help="A plan file.")],
    to: Annotated[str, typer.Option(help="devicemesh, devicemesh-py, torchtitan or megatron.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file, instead of the terminal.")] = None,
) -> None:
    """Write a parallelism plan for another program; what that cannot express is an error."""
    from .training import command

    with _errors():
        command.export(plan, to, output, terminal.console())


@app.command()
def env() -> None:
    """What this installation consists of, and what it can run on."""
    from importlib.metadata import PackageNotFoundError, version

    import triton
    from triton.backends import backends

    table = Table(show_header=False, box=None)
    for name in ("triton-ext", "triton", "torch", "llvmlite", "xdsl", "mpi4py"):
        try:
            table.add_row(name, version(name))
        except PackageNotFoundError:
            table.add_row(name, "not installed")
    for name, backend in sorted(backends.items()):
        state = "active" if backend.driver is not None and backend.driver.is_active() else "compiles only"
        table.add_row(f"backend {name}", state)
    current = triton.runtime.driver.active.get_current_target()
    table.add_row("kernels run on", f"{current.backend}:{current.arch}")
    for name in ("TRITON_EXT_TIMEOUT_S", "TRITON_EXT_NUM_THREADS", "TRITON_DEFAULT_BACKEND"):
        table.add_row(name, os.environ.get(name, "not set"))
    terminal.console().print(table)


@contextmanager
def _errors() -> Iterator[None]:
    """A user's mistake is one line, and status 1."""
    try:
        yield
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _cores(text: str) -> list[int]:
    """Cores of this machine, as in 0,1."""
    there = os.sched_getaffinity(0)
    try:
        chosen = [int(part) for part in text.split(",")]
    except ValueError:
        raise TritonExtError(f"--cores {text}: write it as numbers with commas, for instance 0,1") from None
    if missing := set(chosen) - there:
        raise TritonExtError(f"--cores {text}: core {min(missing)} is not there; there are {sorted(there)}")
    return chosen


def _load(kernel: str) -> tuple[ModuleType, Any]:
    """The module and the kernel of FILE:KERNEL."""
    from triton.runtime.jit import JITFunction

    file, separator, name = kernel.rpartition(":")
    if not separator or not Path(file).is_file():
        raise TritonExtError(f"{kernel}: write it as FILE:KERNEL, with a Python file that exists")
    module = import_file(Path(file))
    kernels = [n for n, value in inspect.getmembers(module) if isinstance(value, JITFunction)]
    if name not in kernels:
        raise TritonExtError(f"{file} has no @triton.jit function {name}; it has: {', '.join(kernels) or 'none'}")
    return module, getattr(module, name)
