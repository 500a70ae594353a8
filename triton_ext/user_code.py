"""What a user names on the command line: Python files, modules, and NAME=VALUE."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import TritonExtError


def name_values(texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE, as in width=128: what is no Python literal is a text. Raises TritonExtError for anything else."""
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise TritonExtError(f"{text!r}: write it as NAME=VALUE")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
        except (TypeError, MemoryError, RecursionError) as error:
            raise TritonExtError(f"{text!r}: a literal without a value: {error}") from None
    return values


def import_file(path: Path) -> ModuleType:
    """Import a Python file, as part of its package if it is in one. Raises TritonExtError for any other file."""
    path = path.resolve()
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").exists():
        parts.insert(0, root.name)
        root = root.parent
    if len(parts) > 1:
        sys.path.insert(0, str(root))
        return importlib.import_module(".".join(parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TritonExtError(f"{path}: not a Python file; its name should end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(root))  # for what it imports from beside it
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
