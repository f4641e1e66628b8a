"""The Java of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

RELEASES: Final = (17, 21)
"""The releases of Java that Spark and the embedded broker run on."""

_ANSWER_S: Final = 30.0


def java_command() -> str | None:
    """Return the program `java` of JAVA_HOME, or else of the PATH; None where there is none."""
    java_home = os.environ.get("JAVA_HOME")
    return shutil.which(str(Path(java_home, "bin", "java")) if java_home else "java")


def missing_java() -> str:
    """Say where no Java was found."""
    java_home = os.environ.get("JAVA_HOME")
    return (
        f"JAVA_HOME is {java_home}, and no bin/java is there"
        if java_home
        else "no java is on the PATH"
    )


def java_problem() -> str | None:
    """Say why this machine's Java does not fit, or return None where it does. This starts a JVM."""
    command = java_command()
    if command is None:
        return missing_java()
    try:
        answer = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{command} does not run"
    version = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if version is None:
        return f"{command} does not say its version"
    return None if int(version[1]) in RELEASES else f"{command} is Java {version[1]}"
