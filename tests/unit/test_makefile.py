"""What `make` does again, and what it takes for done."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.packaging import ROOT


@pytest.mark.parametrize(
    ("target", "lock", "folder", "stamp"),
    [
        ("test-long", "tests/registry/jars.lock", "registry", ".registry"),
        ("s3-test", "tests/stores/jars.lock", "s3", ".s3"),
        ("bench", "benchmarks/jars.lock", "benchmarks", ".benchmarks"),
    ],
)
def test_jars_are_fetched_until_a_fetch_has_ended_well(
    target: str, lock: str, folder: str, stamp: str, tmp_path: Path
) -> None:
    """One that fails halfway leaves their folder, with the time of its failure."""
    locks = ("requirements.lock", "pyproject.toml", "pipelines/watersmeet/jvm/jars.lock", lock)
    for name in ("Makefile", *locks):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    environment = tmp_path / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").touch()
    (environment / ".installed").touch()
    (environment / "jars" / folder).mkdir(parents=True)

    def is_fetched() -> bool:
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return f"fetch-jars {lock}" in done.stdout

    assert is_fetched()
    (environment / stamp).touch()
    assert not is_fetched()
