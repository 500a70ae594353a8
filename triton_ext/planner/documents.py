"""YAML and JSON documents: read, checked with pydantic, and faults told as "file: field: value: what is wrong"."""

from __future__ import annotations

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
    """A mapping in a document; a field that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


_Document = TypeVar("_Document", bound=Entry)


def load(path: Path, error: type[TritonExtError]) -> Any:
    """The contents of a YAML or JSON file (JSON is YAML). Raises `error`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{path}: it cannot be read: {cause}") from None
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as cause:
        raise error(f"{path}: neither YAML nor JSON: {cause}") from None


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


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 25e9 for a text, 1.2 and JSON for a number: so do we."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
