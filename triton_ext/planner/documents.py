"""YAML and JSON documents: read, checked with pydantic, and faults told as "file: field: value: what is wrong"."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import TritonExtError
from .fields import describe

Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Entry(BaseModel):
    """A mapping in a document; a field that it does not know is an error, and so is a value of another type, but for a
    whole number where any may be."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)


_Document = TypeVar("_Document", bound=Entry)


def load(path: Path, error: type[TritonExtError]) -> Any:
    """The contents of a YAML or JSON file (JSON is YAML). Raises `error`, for a key given twice too."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path}: it cannot be read: {cause}") from None
    try:
        return yaml.load(text, Loader=_Loader)
    except _Fault as cause:
        raise error(f"{path}: line {cause.line}: {cause}") from None
    except yaml.YAMLError as cause:
        raise error(f"{path}: neither YAML nor JSON: {cause}") from None
    except RecursionError:
        raise error(f"{path}: it is nested too deeply") from None


def load_json(path: Path, error: type[TritonExtError]) -> Any:
    """As `load`, of a file that is JSON only, and quicker."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_mapping)
    except (OSError, ValueError) as cause:
        raise error(f"{path}: it cannot be read: {cause}") from None
    except RecursionError:
        raise error(f"{path}: it is nested too deeply") from None


def dump(data: object) -> str:
    """YAML that `load` reads as the same data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None)


def check(
    kind: type[_Document],
    data: object,
    where: str,
    what: str,
    error: type[TritonExtError],
    page: str = "docs/planner.md",
) -> _Document:
    """`data` as a document of this kind, or `error` with every fault; `what` is it, and `page` tells of its fields."""
    try:
        return kind.model_validate(data)
    except ValidationError as faults:
        raise error("\n".join(f"{where}: {describe(fault, what, page)}" for fault in faults.errors())) from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice!r} is there twice; give it once")
    return result


class _Fault(Exception):
    """What YAML allows, or its library does not catch."""

    def __init__(self, node: yaml.Node, what: str) -> None:
        super().__init__(what)
        self.line = node.start_mark.line + 1


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 25e9 for a text, 1.2 and JSON for a number: so do we. Keys that are there twice are faults."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _Fault(key, f"{key.value!r} is there twice; give it once")
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as cause:
            kind = node.tag.rpartition(":")[2]
            raise _Fault(node, f"{node.value!r} looks like a {kind}, and is none ({cause}); quote a text") from None

    def construct_scalar(self, node: Any) -> Any:
        """JSON writes a character beyond 16 bits as two."""
        return super().construct_scalar(node).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
