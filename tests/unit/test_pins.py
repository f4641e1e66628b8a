"""What is installed is what was recorded: every package and JVM artifact has its hashes in the
repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.packaging import dependencies, extras, of_development

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[\w+\])?==([^\s;\\]+)", re.MULTILINE)

pytestmark = pytest.mark.promise("C35")


def pins(file: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in PIN.findall((ROOT / file).read_text("utf-8")):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def chosen(names: Iterable[str]) -> list[Requirement]:
    return [requirement for name in names for requirement in extras()[name]]


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The names of the packages that these requirements install here, and of those that they
    need."""
    found: set[str] = set()
    asked = [(each, extra) for each in requirements for extra in ("", *each.extras)]
    seen: set[tuple[str, str]] = set()
    while asked:
        requirement, extra = asked.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        for needed in map(Requirement, requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                asked += [(needed, of) for of in ("", *needed.extras)]
    return found


def test_the_lock_has_every_package_that_is_asked_for_in_its_version() -> None:
    asked, locked = pins("requirements.txt"), pins("requirements.lock")
    assert {name: locked.get(name) for name in asked} == asked
    assert len(locked) > 2 * len(asked)


def test_what_builds_packages_is_what_the_lock_has() -> None:
    """By hatchling this repository's own package, by setuptools pyspark, which comes as source."""
    assert {"hatchling", "editables", "setuptools", "wheel"} <= pins("requirements.lock").keys()


def test_every_package_of_the_lock_has_hashes() -> None:
    entries = (ROOT / "requirements.lock").read_text("utf-8").replace("\\\n", " ").splitlines()
    without = [
        entry
        for entry in entries
        if not entry.startswith(("#", " ")) and " --hash=sha256:" not in entry
    ]
    assert without == []


def test_the_lock_names_no_place_to_fetch_from() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text("utf-8")


@pytest.mark.parametrize(
    "ivy_file", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/ivy.xml"))
)
def test_every_artifact_that_an_ivy_file_names_is_locked_with_its_hash(ivy_file: str) -> None:
    lines = (ROOT / ivy_file).with_name("jars.lock").read_text("utf-8").splitlines()
    assert all(re.fullmatch(r"[0-9a-f]{64}  [\w-]+/[\w.-]+(:[\w.-]+){2,4}", line) for line in lines)
    text = (ROOT / ivy_file).read_text("utf-8")
    named = re.findall(
        r'<dependency org="([^"]+)" name="([^"]+)" rev="([^"]+)" conf="([^"]+)->', text
    )
    assert named
    locked = [line.partition("  ")[2] for line in lines]
    for organisation, name, revision, group in named:
        coordinates = f"{group}/{organisation}:{name}:{revision}"
        assert any(f"{place}:".startswith(f"{coordinates}:") for place in locked), coordinates


def test_what_make_demo_installs_has_no_spark_and_no_tool_of_development() -> None:
    """Of the packages in `requirements.txt`; `tests/integration/test_make_demo.py` looks at what is
    there."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    recipe = makefile.partition("$(VENV)/.embedded:")[2].partition("\n\n")[0]
    installed = closure([*dependencies(), *chosen(re.findall(r"--extra (\w+)", recipe))])
    assert {"jgo", "great-expectations", "deltalake"} <= installed
    assert "pyspark" not in installed
    assert installed & of_development() == set()
