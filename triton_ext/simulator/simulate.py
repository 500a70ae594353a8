"""From a kernel and its arguments to simulations: compile, copy all memory, and run with many seeds."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction

from ..errors import SimulationError
from ..ir import read_module
from ..passes import abi, dialect, nvshmem
from ..runtime.plans import Plan
from ..testing import World
from .machine import Launch, Machine
from .memory import FirstWrite, Place, Region
from .report import Finding, Report
from .translate import Code, translate
from .values import bf16

Arguments = Callable[[int], Mapping[str, Any]]
_one_at_a_time = threading.Lock()  # Python 3.11's ast.parse is not made for threads
_POISON = 0xFF  # NaN in floats, -1 in integers


class result_of:
    """As a kernel's argument: the memory of a plan's result, which `plan.result` gives after a run only."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


class Simulation:
    """A kernel with its arguments on every rank of a world, ready to be run with any seed.

    kernel: a @triton.jit function. args(rank): the kernel's arguments by name, plans among them, and `grid`; called
    once on each of `world` virtual ranks. expected(rank): what the result of the (first) plan must be. hosts: the
    virtual host of each rank; what goes to another one goes through NVSHMEM.
    """

    def __init__(
        self,
        kernel: JITFunction,
        world: int,
        args: Arguments,
        expected: Callable[[int], torch.Tensor] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        self.kernel, self.world = kernel, world
        self.places: dict[int, Place] = {}
        self._texts: list[str] = []
        self._bound: list[tuple[list[Any], tuple[int, int, int]]] = []
        dtypes: list[torch.dtype] = []
        for text, bound, grid, places, keywords in World(world, hosts=hosts).run(self._prepare, args):
            dtypes += [value._state.dtype for value in keywords.values() if isinstance(value, Plan)][:1]
            self._texts.append(text)
            self._bound.append((bound, grid))
            for place in places:
                if place.content.size:
                    self.places.setdefault(place.address, place)
        self.expected = [expected(rank).to(dtype) for rank, dtype in enumerate(dtypes)] if expected else None
        self.modules = {text: read_module(text) for text in self._texts}
        self.codes = {text: translate(module) for text, module in self.modules.items()}

    def _prepare(
        self, rank: int, args: Arguments
    ) -> tuple[str, list[Any], tuple[int, int, int], list[Place], Mapping[str, Any]]:
        """On a virtual rank: the kernel's IR, its run-time arguments, and the memory that they point to (which the last
        value keeps, so that no two ranks' tensors have one address).
        """
        keywords = dict(args(rank))
        grid = keywords.pop("grid", None)
        if grid is None:
            raise SimulationError(f"args({rank}) has no grid: add grid=plan.grid(*block)")
        grid = grid if isinstance(grid, Sequence) else (grid,)
        places: list[Place] = []
        for name, value in keywords.items():
            if isinstance(value, result_of):
                keywords[name] = value.plan._state.view_of_result()
        bound = inspect.signature(self.kernel.fn).bind(**keywords)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if isinstance(value, Plan):
                places += _places_of(value, name, rank)
        for name, value in bound.arguments.items():
            if isinstance(value, torch.Tensor) and not any(_contains(place, value) for place in places):
                places.append(_place_of(value, name, rank))
        source = self._source(grid, bound.arguments)
        arguments: list[Any] = []
        for kind, value in zip(source.signature.values(), bound.arguments.values(), strict=True):
            _flatten(kind, value, arguments)
        with _one_at_a_time:
            text = lowered_ir(source)
        x, y, z, *_ = (*map(int, grid), 1, 1)
        return text, arguments, (x, y, z), places, keywords

    def _source(self, grid: Any, arguments: Mapping[str, Any]) -> Any:
        """Triton's ASTSource of the kernel, specialised for its arguments; for NVSHMEM between hosts."""
        source = self.kernel.warmup(grid=grid, **arguments).src
        for index, value in enumerate(arguments.values()):
            if isinstance(value, Plan) and (spec := dialect.Spec.decode(value.spec.value)).transport:
                source.constants[index, 1] = replace(spec, transport=nvshmem.LIBRARY).encode()
        return source

    def run(
        self,
        seed: int,
        runs: int = 2,
        resident: int | None = None,
        partial: bool = False,
        codes: Mapping[str, Code] | None = None,
    ) -> tuple[Finding | None, int]:
        """One simulation: its first fault or None, and its number of steps. codes: instead of `self.codes`."""
        codes = codes or self.codes
        launches = [
            Launch(codes[text], arguments, grid)
            for text, (arguments, grid) in zip(self._texts, self._bound, strict=True)
        ]
        slots = resident or max(math.prod(launch.grid) for launch in launches)
        check = self._check if self.expected else None
        while True:
            machine = Machine(launches, list(self.places.values()), seed, runs, slots, partial, check)
            try:
                return machine.run(), machine.steps
            except FirstWrite as found:
                self.places[found.place.address] = replace(found.place, is_shared=True)

    def _check(self, rank: int, run: int, region: Region) -> str | None:
        assert self.expected is not None
        expected = self.expected[rank]
        found = torch.from_numpy(region.data.copy()).view(expected.dtype).view(region.place.shape)
        if found.shape != expected.shape:
            return f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        tolerance = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 1e-4}.get(expected.dtype, 0)
        close = torch.isclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        if close.all():
            return None
        at = tuple(int(i) for i in torch.nonzero(~close)[0])
        return f"element {at} is {found[at].item():g}, expected {expected[at].item():g}"


def lowered_ir(source: Any) -> str:
    """A kernel at the end of stage "ttir", as a GPU gets it. source: Triton's ASTSource.

    Of sm_80, since from sm_90 on tensor descriptors are left to the hardware.
    """
    target = GPUTarget("cuda", 80, 32)
    backend = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": True})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, codegen, modules, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def simulate(
    kernel: JITFunction,
    world: int,
    args: Arguments,
    *,
    seeds: int | Sequence[int] = 100,
    runs: int = 2,
    resident: int | None = None,
    partial: bool = False,
    expected: Callable[[int], torch.Tensor] | None = None,
    hosts: Sequence[int] | None = None,
) -> Report:
    """Run a kernel's lowered IR for `world` ranks with many interleavings, and raise SimulationError for a fault.

    kernel, args, expected, hosts: as in Simulation. seeds: how many, or which. runs: launches in a row. resident:
    programs of a rank under way at once (default: all; where it is not given, every other seed has 1 or 2). partial:
    the kernel means to leave elements of the result unwritten.
    """
    simulation = Simulation(kernel, world, args, expected, hosts)
    report = Report(kernel.__name__, world, runs)
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        finding, steps = simulation.run(seed, runs, resident or residents(seed), partial)
        report.seeds += 1
        report.steps += steps
        if finding is not None:
            report.findings.append(finding)
            break
    if report.findings:
        raise SimulationError(str(report))
    return report


def residents(seed: int) -> int | None:
    """How many programs of a rank are under way at once: all, one, all, two."""
    return (None, 1, None, 2)[seed % 4]


def _flatten(kind: Any, value: Any, into: list[Any]) -> None:
    """A bound argument as the values that the compiled kernel takes."""
    if isinstance(kind, tuple):
        for each, part in zip(kind, value, strict=True):
            _flatten(each, part, into)
    elif kind == "constexpr":
        return
    elif kind.startswith("*"):
        into.append(0 if value is None else value.data_ptr())
    elif kind == "bf16":
        into.append(bf16(np.float32(value)))
    elif kind.startswith("fp"):
        into.append(np.dtype(f"float{kind[2:]}").type(value))
    else:
        into.append(bool(value) if kind in ("i1", "u1") else int(value))


def _contains(place: Place, tensor: torch.Tensor) -> bool:
    return place.address <= tensor.data_ptr() < place.address + place.content.size


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def _place_of(tensor: torch.Tensor, name: str, rank: int) -> Place:
    """An ordinary tensor of one rank: its storage."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return Place(f"argument {name}", rank, storage.data_ptr(), _bytes(whole), tensor.element_size())


def _places_of(plan: Plan, name: str, rank: int) -> list[Place]:
    """The regions of one rank's plan: its table, its signals, its result and its staging area."""
    state = plan._state
    table = plan.table
    words = _bytes(table).copy()
    base = table.data_ptr()
    names = {getattr(abi, n) - abi.EPOCH: n for n in ("EPOCH", "BASE", "TICKETS", "DONE", "STATUS", "REPORT")}
    places = [
        Place(f"table of {name}", rank, base, words[: abi.EPOCH * 8]),
        Place(
            f"state of {name}", rank, base + abi.EPOCH * 8, words[abi.EPOCH * 8 : abi.PEERS * 8], 8, True, words=names
        ),
        Place(f"peers of {name}", rank, base + abi.PEERS * 8, words[abi.PEERS * 8 :]),
    ]
    for region in state.regions():
        content = np.full(region.nbytes, _POISON, np.uint8)
        if region.words:
            content[:] = 0
        is_output = not region.words  # what consists of words is not written anew in every run
        about = (region.unit_bytes, True, is_output, region.shape, region.words, region.per_run)
        places.append(Place(f"{region.name} of {name}", rank, region.address, content, *about))
    clock = state.watch.clock_ms
    places.append(Place("clock", rank, clock.data_ptr(), _bytes(clock), 8, True))
    return places
