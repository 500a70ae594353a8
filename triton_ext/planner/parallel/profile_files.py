"""Profiles as files, in the JSON format that Metis reads.

Two layouts are read: `DeviceType.<TYPE>_tp<T>_bs<B>.json` in one folder (Metis's own, and what `write` writes), and
`[<model>/]<device type>/mbs<B>_tmp<T>.json` (Sailor's public profiles). A file has `model` (name, layers, parameters),
`execution_time` in ms (forward and backward by layer) and `execution_memory` in MiB by layer.

What files leave open is decided here, and reported as a note:
- Parameters by layer are unsharded in the first layout, a device's shard in the second. Where there is a file of tp 1
  the totals decide.
- `activation_parameters_bytes` (only in the second layout) is what a layer hands on, for the whole micro-batch.
- Lists longer than the times: the surplus at the end belongs to the last layer (final norm and head, measured as one).
- What a further micro-batch in flight adds to the memory is no field: it is the slope of the memory over the
  micro-batch size, of this or another device type; without a second size, what exceeds parameters, gradients and
  two moments of Adam.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import PlanningError
from .profiles import Key, Model, Point, Profiles

_MIB = 1 << 20
_FLAT = re.compile(r"DeviceType\.(?P<type>.+)_tp(?P<tp>\d+)_bs(?P<samples>\d+)\.json")
_NESTED = re.compile(r"mbs(?P<samples>\d+)_tmp(?P<tp>\d+)\.json")
_EXTENSION = "triton_ext"  # fields that Metis's format has not
_STATE_COPIES = 4  # float32 parameters, gradients and two moments of Adam
_UNUSED_MS = ("layernorm_grads_all_reduce_time_ms", "embedding_grads_all_reduce_time_ms")


@dataclass(frozen=True)
class Note:
    """Something missing, inconsistent or dropped: where, which field, and what was done."""

    file: str
    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.field}: {self.text}"


@dataclass(frozen=True)
class _File:
    key: Key
    model_name: str
    sharded: bool  # by the layout's convention
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]  # of one sample; () where the file does not say
    point: Point
    name: str


def read(
    folder: str | Path, model: str | None = None, activation_bytes: int | Sequence[int] | None = None
) -> tuple[Profiles, tuple[Note, ...]]:
    """All profiles of one model below a folder.

    model: which one, where the folder has several: the path of its own folder below this one. activation_bytes: what
    each layer, or any of them, hands to the next for one sample (float32: 4 * sequence length * hidden size), if no
    file says it.
    Raises PlanningError, naming file and field, for a file that cannot be used.
    """
    folder = Path(folder)
    found = _find(folder, model)
    notes: list[Note] = []
    files = [_read_file(path, folder, key, sharded, notes) for path, key, sharded in found]
    layers = len(files[0].point.layer_ms)
    for file in files:
        if len(file.point.layer_ms) != layers:
            raise PlanningError(
                f"{file.name}: execution_time.layer_compute_total_ms has {len(file.point.layer_ms)} entries, "
                f"{files[0].name} has {layers}; they are of different models"
            )
    files.sort(key=lambda file: (file.key[1], file.key[2], file.key[0], file.name))
    if names := sorted({file.model_name for file in files} - {files[0].model_name}):
        notes.append(Note(files[0].name, "model.model_name", f"is {files[0].model_name}, other files say {names}"))
    parameters, shards = _parameters(files, notes)
    handed_on = _activations(files, activation_bytes, layers, notes)
    points: dict[Key, Point] = {}
    for file in files:
        point = file.point
        if not point.parameter_bytes and file.key[1] in shards:
            point = replace(point, parameter_bytes=shards[file.key[1]])
        if points.setdefault(file.key, point) != point:
            notes.append(Note(file.name, "file", "dropped: another file has this point, with other numbers"))
    described = Model(files[0].model_name, parameters, handed_on)
    profiles = Profiles(described, _with_activation_memory(described, points, notes))
    _check_memory(profiles, notes)
    return profiles, _merged(notes)


def write(profiles: Profiles, folder: str | Path) -> tuple[Path, ...]:
    """Every point as a file in Metis's layout; `read` gives the same profiles back."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model, paths = profiles.model, []
    for key in sorted(profiles.points):
        device_type, tp, samples = key
        point = profiles.points[key]
        extension = {
            "source": point.source,
            "forward_share": point.forward_share,
            "activation_memory_bytes": list(point.activation_memory_bytes),
            "parameter_shard_bytes": list(point.parameter_bytes),
        }
        document = {
            "model": {
                "model_name": model.name,
                "num_layers": model.layers,
                "parameters": {
                    "total_parameters_bytes": sum(model.parameter_bytes),
                    "parameters_per_layer_bytes": list(model.parameter_bytes),
                    "activation_parameters_bytes": [size * samples for size in model.activation_bytes],
                },
            },
            "execution_time": {
                "total_time_ms": point.forward_backward_ms + point.optimizer_ms + point.batch_generator_ms,
                "forward_backward_time_ms": point.forward_backward_ms,
                "batch_generator_time_ms": point.batch_generator_ms,
                "optimizer_time_ms": point.optimizer_ms,
                "layer_compute_total_ms": list(point.layer_ms),
            },
            "execution_memory": {
                "total_memory_mb": sum(point.memory_bytes) / _MIB,
                "layer_memory_total_mb": [size / _MIB for size in point.memory_bytes],
            },
            _EXTENSION: extension,
        }
        path = folder / f"DeviceType.{device_type}_tp{tp}_bs{samples}.json"
        path.write_text(json.dumps(document, indent=2) + "\n")
        paths.append(path)
    return tuple(paths)


def _find(folder: Path, model: str | None) -> list[tuple[Path, Key, bool]]:
    if not folder.is_dir():
        raise PlanningError(f"{folder}: no such folder of profiles")
    found: dict[str, list[tuple[Path, Key, bool]]] = {}  # by the folder that stands for a model

    def name(group: Path) -> str:
        return group.relative_to(folder).as_posix() if group != folder else folder.resolve().name

    for path in sorted(folder.rglob("*.json")):
        if match := _FLAT.fullmatch(path.name):
            key = (match["type"], int(match["tp"]), int(match["samples"]))
            found.setdefault(name(path.parent), []).append((path, key, False))
        elif match := _NESTED.fullmatch(path.name):
            key = (path.parent.name, int(match["tp"]), int(match["samples"]))
            found.setdefault(name(path.parent.parent), []).append((path, key, True))
    if not found:
        raise PlanningError(
            f"{folder}: no profiles; files are named DeviceType.<TYPE>_tp<T>_bs<B>.json or "
            "<device type>/mbs<B>_tmp<T>.json"
        )
    if model in found:
        return found[model]
    if model is not None:
        raise PlanningError(f"{folder}: no profiles of a model {model!r}; give one of {', '.join(sorted(found))}")
    if len(found) > 1:
        raise PlanningError(f"{folder}: profiles of several models; give one of {', '.join(sorted(found))}")
    (only,) = found.values()
    return only


class _Document:
    """A file's fields by dotted path, with errors that name both."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        try:
            self.content = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise PlanningError(f"{name}: not a JSON file: {error}") from error

    def get(self, field: str) -> object:
        value: object = self.content
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def wrong(self, field: str, expected: str) -> PlanningError:
        value = json.dumps(self.get(field))
        return PlanningError(f"{self.name}: {field} is {value[:60]}; expected {expected}")

    def number(self, field: str) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        if not _is_number(value):
            raise self.wrong(field, "a number that is not negative")
        return float(value)  # type: ignore[arg-type]

    def needed(self, field: str) -> float:
        value = self.number(field)
        if value is None:
            raise self.wrong(field, "a number")
        return value

    def numbers(self, field: str) -> tuple[float, ...]:
        value = self.get(field)
        if not isinstance(value, list) or not value or not all(map(_is_number, value)):
            raise self.wrong(field, "a list of numbers that are not negative, one for each layer")
        return tuple(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _read_file(path: Path, folder: Path, key: Key, sharded: bool, notes: list[Note]) -> _File:
    name = path.relative_to(folder).as_posix()
    document = _Document(path, name)
    if min(key[1:]) < 1:
        raise PlanningError(f"{name}: tensor-parallel degree and micro-batch must be at least 1")

    times = document.numbers("execution_time.layer_compute_total_ms")
    if not any(times):
        raise PlanningError(f"{name}: execution_time.layer_compute_total_ms is 0 for every layer; measure it again")
    declared = document.number("model.num_layers")
    if declared is None:
        notes.append(Note(name, "model.num_layers", f"missing; the times have {len(times)} layers"))
    elif declared != len(times):
        notes.append(Note(name, "model.num_layers", f"is {declared:g}; used the {len(times)} layers of the times"))

    def by_layer(field: str, joined: bool = True) -> tuple[float, ...]:
        values = document.numbers(field)
        surplus = len(values) - len(times)
        if surplus < 0:
            raise PlanningError(f"{name}: {field} has {len(values)} entries, the times have {len(times)}")
        if not surplus:
            return values
        what = "is added to the last layer" if joined else "but its last entry is dropped"
        notes.append(Note(name, field, f"has {len(values)} entries for {len(times)} layers; the surplus {what}"))
        return (*values[: len(times) - 1], sum(values[len(times) - 1 :]) if joined else values[-1])

    forward_backward = document.number("execution_time.forward_backward_time_ms")
    if forward_backward is None:
        forward_backward = sum(times)
        field = "execution_time.forward_backward_time_ms"
        notes.append(Note(name, field, "missing; used the sum of the layers"))
    batch_generator = document.number("execution_time.batch_generator_time_ms")
    if batch_generator is None:
        notes.append(Note(name, "execution_time.batch_generator_time_ms", "missing; taken as 0"))
    for unused in _UNUSED_MS:
        if document.number(f"execution_time.{unused}") is None:
            notes.append(Note(name, f"execution_time.{unused}", "missing; no cost uses it"))
    if all(document.number(f"execution_memory.{field}") is None for field in ("total_memory_mb", "total_memory")):
        notes.append(Note(name, "execution_memory.total_memory_mb", "missing; used the sum of the layers"))

    activations: tuple[int, ...] = ()
    if document.get("model.parameters.activation_parameters_bytes") is not None:
        whole = by_layer("model.parameters.activation_parameters_bytes", joined=False)
        activations = tuple(round(size / key[2]) for size in whole)
    extension = document.get(_EXTENSION) is not None
    optional_bytes = {
        field: _whole(document.numbers(f"{_EXTENSION}.{field}"))
        for field in ("activation_memory_bytes", "parameter_shard_bytes")
        if document.get(f"{_EXTENSION}.{field}")
    }
    memory_mib = by_layer("execution_memory.layer_memory_total_mb")
    try:
        point = Point(
            layer_ms=tuple(map(float, times)),
            memory_bytes=tuple(round(size * _MIB) for size in memory_mib),
            forward_backward_ms=forward_backward,
            optimizer_ms=document.needed("execution_time.optimizer_time_ms"),
            batch_generator_ms=batch_generator or 0.0,
            forward_share=document.needed(f"{_EXTENSION}.forward_share") if extension else 1 / 3,
            activation_memory_bytes=optional_bytes.get("activation_memory_bytes", ()),
            parameter_bytes=optional_bytes.get("parameter_shard_bytes", ()),
            source=str(document.get(f"{_EXTENSION}.source")) if extension else "measured",
        )
    except PlanningError as error:
        raise PlanningError(f"{name}: {error}") from error
    model_name = document.get("model.model_name")
    if not isinstance(model_name, str) or not model_name:
        raise document.wrong("model.model_name", "a name")
    parameters = _whole(by_layer("model.parameters.parameters_per_layer_bytes"))
    return _File(key, model_name, sharded, parameters, activations, point, name)


def _whole(values: Sequence[float]) -> tuple[int, ...]:
    return tuple(map(round, values))


def _parameters(files: Sequence[_File], notes: list[Note]) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """Unsharded parameters by layer, and the shards by degree where files have them. `files` are sorted by degree."""
    field = "model.parameters.parameters_per_layer_bytes"
    by_degree: dict[int, _File] = {}
    for file in files:
        first = by_degree.setdefault(file.key[1], file)
        if file.parameter_bytes != first.parameter_bytes:
            notes.append(Note(file.name, field, f"differs from {first.name}, which is used"))
    lowest, *others = by_degree
    base = by_degree[lowest]
    if lowest == 1:
        # Whole layers in a file of a higher degree: their sum is that of tp 1, not a part of it.
        sharded = any(
            sum(by_degree[tp].parameter_bytes) < (0.5 + 0.5 / tp) * sum(base.parameter_bytes) for tp in others
        )
        return base.parameter_bytes, {t: f.parameter_bytes for t, f in by_degree.items()} if sharded else {}
    if not base.sharded:
        return base.parameter_bytes, {}
    shards = {tp: file.parameter_bytes for tp, file in by_degree.items()}
    if not others:
        notes.append(Note(base.name, field, f"a shard of tp {lowest}; the whole layer is taken as {lowest} times it"))
        return tuple(size * lowest for size in base.parameter_bytes), shards
    # A shard is (replicated part) + (sharded part) / degree: two degrees give both.
    second = others[0]
    notes.append(Note(base.name, field, f"shards of tp {lowest} and {second}; the whole layer follows from both"))
    whole = []
    for small, large in zip(shards[second], shards[lowest], strict=True):
        split = (large - small) / (1 / lowest - 1 / second)
        whole.append(round(large + split * (1 - 1 / lowest)))
    return tuple(whole), shards


def _activations(
    files: Sequence[_File], given: int | Sequence[int] | None, layers: int, notes: list[Note]
) -> tuple[int, ...]:
    field = "model.parameters.activation_parameters_bytes"
    saying = [file for file in files if file.activation_bytes]
    if saying and given is not None:
        notes.append(Note(saying[0].name, field, "is there; the activation_bytes given are not used"))
    if not saying and given is not None:
        values = (given,) * layers if isinstance(given, int) else tuple(given)
        if len(values) != layers:
            raise PlanningError(f"activation_bytes has {len(values)} entries, the model {layers} layers")
        return values
    if not saying:
        raise PlanningError(
            f"{files[0].name}: {field} is missing, in the other files too; give activation_bytes "
            "(4 * sequence length * hidden size for each layer)"
        )
    first = saying[0]
    for file in files:
        if not file.activation_bytes:
            notes.append(Note(file.name, field, f"missing; used {first.name}'s"))
        # The head's output is split by the degree; nothing follows it, so it may differ.
        elif file.activation_bytes[:-1] != first.activation_bytes[:-1]:
            notes.append(Note(file.name, field, f"differs for one sample from {first.name}, which is used"))
    return first.activation_bytes


def _with_activation_memory(model: Model, points: Mapping[Key, Point], notes: list[Note]) -> dict[Key, Point]:
    series: dict[tuple[str, int], list[int]] = {}
    for device_type, tp, samples in sorted(points):
        series.setdefault((device_type, tp), []).append(samples)
    slopes: dict[tuple[str, int], tuple[float, ...]] = {}
    for (device_type, tp), sizes in series.items():
        low, high = sizes[0], sizes[-1]
        if low != high:
            first, last = points[device_type, tp, low], points[device_type, tp, high]
            pairs = zip(first.memory_bytes, last.memory_bytes, strict=True)
            slopes[device_type, tp] = tuple(max(0.0, (b - a) / (high - low)) for a, b in pairs)
    filled = {}
    for key in sorted(points):
        device_type, tp, samples = key
        point = points[key]
        if point.activation_memory_bytes:
            filled[key] = point
            continue
        where, field = f"{device_type} tp {tp} micro-batch {samples}", "activation memory"
        slope = slopes.get((device_type, tp))
        if slope is None:
            donor = next((name for name, degree in sorted(slopes) if degree == tp), None)
            if donor is not None:
                slope = slopes[donor, tp]
                notes.append(Note(where, field, f"one micro-batch size only; the slope is that of {donor}"))
        if slope is not None:
            amounts = tuple(min(size, round(s * samples)) for size, s in zip(point.memory_bytes, slope, strict=True))
        else:
            notes.append(Note(where, field, f"one micro-batch size only; the memory above {_STATE_COPIES}x parameters"))
            shards = point.parameter_bytes or tuple(size // tp for size in model.parameter_bytes)
            amounts = tuple(
                max(0, size - _STATE_COPIES * shard) for size, shard in zip(point.memory_bytes, shards, strict=True)
            )
        filled[key] = replace(point, activation_memory_bytes=amounts)
    return filled


def _check_memory(profiles: Profiles, notes: list[Note]) -> None:
    for (device_type, tp), sizes in profiles.microbatches.items():
        for small, large in itertools.pairwise(sizes):
            before = profiles.points[device_type, tp, small].memory_bytes
            after = profiles.points[device_type, tp, large].memory_bytes
            falling = [layer for layer, (a, b) in enumerate(zip(before, after, strict=True)) if b < a]
            if falling:
                layer = falling[0]
                notes.append(
                    Note(
                        f"{device_type} tp {tp} micro-batch {large}",
                        "execution_memory.layer_memory_total_mb",
                        f"is less than at micro-batch {small} in {len(falling)} layers, first in layer {layer}: "
                        f"{after[layer] / _MIB:g} after {before[layer] / _MIB:g}; kept as measured",
                    )
                )


def _merged(notes: Sequence[Note]) -> tuple[Note, ...]:
    """One note for each field and text; where many files share it, the first of them and their number."""
    groups: dict[tuple[str, str], list[str]] = {}
    for note in notes:
        groups.setdefault((note.field, note.text), []).append(note.file)
    merged = []
    for (field, text), files in sorted(groups.items()):
        files = sorted(set(files))
        name = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        merged.append(Note(name, field, text))
    return tuple(merged)
