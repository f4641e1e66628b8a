"""`make demo` in a fresh clone: what it installs, and what it shows."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.packaging import ROOT, of_development

OF_MAKING = {"pip", "setuptools", "uv"}
"""What makes an environment, or is in each that Python makes."""

pytestmark = [pytest.mark.promise("C35"), pytest.mark.long]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of this clone that are, or would be, part of the repository."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.split("\0"):
        if (ROOT / name).is_file():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def make(clone: Path, *arguments: str) -> str:
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MAKE", "MFLAGS", "ENGINE"))
    }
    path = [each for each in os.environ["PATH"].split(os.pathsep) if ".venv" not in each]
    done = subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={**ours, "PATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_a_fresh_clone_shows_the_demo_without_spark_or_tools_of_development(clone: Path) -> None:
    shown = make(clone, "demo")
    assert "(142 messages)" in shown
    assert "every expectation is met" in shown
    assert shown.splitlines()[-1].endswith("make demo ENGINE=spark")
    packages = packages_of(clone / ".venv")
    assert {"jgo", "great-expectations", "watersmeet"} <= packages
    assert packages & ({"pyspark", *of_development()} - OF_MAKING) == set()
    again = make(clone, "--dry-run", "demo").splitlines()
    assert [line.split()[0] for line in again[:1]] == [".venv/bin/watersmeet"]
    make(clone, "clean")
    assert not (clone / ".venv").exists()


def packages_of(environment: Path) -> set[str]:
    """The packages of an environment."""
    program = (
        "from importlib.metadata import distributions as found; "
        "print(*(each.name.lower().replace('_', '-') for each in found()))"
    )
    command = [str(environment / "bin" / "python"), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())
