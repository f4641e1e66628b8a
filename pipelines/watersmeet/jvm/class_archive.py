"""The archive of the classes that Spark's JVM loads at its start.

Java maps it into memory (class data sharing), where it would read, check and link 27,000 classes
from jars: a third of a start. It takes only an archive of the very Java and jars.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

from watersmeet.jvm.artifacts import SPARK, java_command, place_of


def folder() -> Path:
    """Return the folder of the archives: the one in which Spark's JVM artifacts have theirs."""
    return place_of(SPARK)


def name() -> str | None:
    """Return the name of the archive for this machine's Java and Spark; None without either."""
    java = java_command()
    jars = _spark_jars()
    if java is None or not jars:
        return None
    program = Path(java).resolve()
    files = [program, *program.parent.parent.glob("lib/modules"), *jars]
    stats = [(str(file), file.stat()) for file in files]
    facts = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return f"spark-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def archive() -> Path | None:
    """Return the archive for this machine's Java and Spark; None where there is none.

    Java crashes with one that was cut off, so its size is part of the name of its file.
    """
    stem = name()
    if stem is None:
        return None
    files = folder().glob(f"{stem}.*.jsa")
    return next((file for file in files if file.stem.endswith(f".{file.stat().st_size}")), None)


def keep(new: Path) -> None:
    """Make a file the archive for this machine's Java and Spark, in place of all others."""
    with new.open("rb") as written:
        os.fsync(written.fileno())
    file = new.replace(folder() / f"{name()}.{new.stat().st_size}.jsa")
    for other in folder().glob("spark-*.jsa"):
        if other != file:
            other.unlink(missing_ok=True)


def java_options() -> list[str]:
    """Return the options by which a JVM of Spark uses the archive; none where there is none."""
    file = archive()
    # Where it does not fit after all, Java is to start without it, and not to tell the user.
    quietly = ["-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
    return [] if file is None else [f"-XX:SharedArchiveFile={file}", *quietly]


def _spark_jars() -> list[Path]:
    spec = find_spec("pyspark")
    if spec is None:
        return []
    spark_home = os.environ.get("SPARK_HOME")
    places = [spark_home] if spark_home else spec.submodule_search_locations or []
    return [jar for place in places for jar in sorted(Path(place, "jars").glob("*.jar"))]
