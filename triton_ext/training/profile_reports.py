"""The reports that `triton-ext profile` writes beside its files: profile.TYPE.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import PlanningError

_FIELDS = {"model": str, "arguments": dict}  # what others read


def load(folder: Path) -> dict[Path, dict[str, Any]]:
    """All reports of a folder, by file. PlanningError for one that is not what `profile` wrote."""
    reports = {}
    for path in sorted(folder.glob("profile.*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise PlanningError(f"{path}: not a report of triton-ext profile: {error}") from None
        for name, kind in _FIELDS.items():
            if not isinstance(report, dict) or not isinstance(report.get(name), kind):
                raise PlanningError(f"{path}: not a report of triton-ext profile: it has no {name}; measure again")
        reports[path] = report
    return reports
