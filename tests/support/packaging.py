"""What the wheel asks for, as the tool that builds it reads `pyproject.toml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hatchling.metadata.core import ProjectMetadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@cache
def _project() -> Any:
    return ProjectMetadata(str(ROOT), None).core


def dependencies() -> list[Requirement]:
    return [Requirement(text) for text in _project().dependencies]


def extras() -> Mapping[str, list[Requirement]]:
    return {
        name: [Requirement(text) for text in texts]
        for name, texts in _project().optional_dependencies.items()
    }


def pinned() -> dict[str, str]:
    """The versions of `requirements.txt`, by package."""
    return _pins((ROOT / "requirements.txt").read_text(encoding="utf-8"))


def of_development() -> set[str]:
    """The packages of `requirements.txt` that are for development alone."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    return set(map(canonicalize_name, _pins(text.partition("# -- tests, checks, notebooks")[2])))


def _pins(text: str) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return dict(line.split("==", 1) for line in lines if line)


def lower_bounds(requirements: Iterable[Requirement]) -> dict[str, str]:
    """The oldest version of each package that all of these requirements take; empty for one without
    a bound."""
    found: dict[str, str] = {}
    for requirement in requirements:
        bound = next(
            (part.version for part in requirement.specifier if part.operator in (">=", "~=", "==")),
            "",
        )
        found[requirement.name] = max(
            found.get(requirement.name, ""), bound, key=lambda text: Version(text or "0")
        )
    return found
