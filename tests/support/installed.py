"""Environments as pip makes them for those who install the wheel, without anything of this
clone's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.packaging import ROOT


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def pip(self, *arguments: str) -> None:
        """Have pip do something, with its cache, and without compiling what most tests never
        import."""
        command = [
            str(self.python),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--disable-pip-version-check",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(
        self, *command: str | Path, cwd: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What a command in the environment's folder of programs does; nothing of the tests' own
        environment is on its path."""
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))
        }
        program, *arguments = command
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=cwd,
            env={**ours, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )


def build_wheel(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        str(ROOT),
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
    ]
    subprocess.run(command, check=True, timeout=300)
    [wheel] = folder.glob("watersmeet-*.whl")
    return wheel
