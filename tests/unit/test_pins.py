"""What is installed is what was recorded: every package and JVM artifact has its hashes in the
repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[\w+\])?==([^\s;\\]+)", re.MULTILINE)

pytestmark = pytest.mark.promise("C35")


def pins(file: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in PIN.findall((ROOT / file).read_text("utf-8")):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def test_the_lock_has_every_package_that_is_asked_for_in_its_version() -> None:
    asked, locked = pins("requirements.txt"), pins("requirements.lock")
    assert {name: locked.get(name) for name in asked} == asked
    assert len(locked) > 2 * len(asked)


def test_what_builds_packages_is_what_the_lock_has() -> None:
    building, locked = pins("requirements-build.lock"), pins("requirements.lock")
    assert {"setuptools", "wheel"} <= building.keys()
    assert {name: locked.get(name) for name in building} == building


LOCKS = ["requirements.lock", "requirements-build.lock"]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_hashes(lock: str) -> None:
    entries = (ROOT / lock).read_text("utf-8").replace("\\\n", " ").splitlines()
    without = [
        entry
        for entry in entries
        if not entry.startswith(("#", " ")) and " --hash=sha256:" not in entry
    ]
    assert without == []


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_place_to_fetch_from(lock: str) -> None:
    assert "://" not in (ROOT / lock).read_text("utf-8")


@pytest.mark.parametrize(
    "ivy_file", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/ivy.xml"))
)
def test_every_file_that_ivy_fetches_has_a_hash(ivy_file: str) -> None:
    hashes = (ROOT / ivy_file).with_suffix(".sha256").read_text("utf-8").splitlines()
    assert all(re.fullmatch(r"[0-9a-f]{64}  [\w-]+/\S+", line) for line in hashes)
    names = re.findall(r'<dependency [^>]*name="([^"]+)"', (ROOT / ivy_file).read_text("utf-8"))
    assert names
    assert len(hashes) >= len(names)
