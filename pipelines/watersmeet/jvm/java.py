"""The Java of this machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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
