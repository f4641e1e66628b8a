"""The pinned JVM artifacts: Delta Lake for Spark, and Apache Kafka's broker.

`ivy.xml` says which they are, and `ivy.sha256` names each file with its hash. `make install` puts
them into the folder `jars` of a clone's environment. Without that, they are fetched into the user's
cache the first time that they are needed. Ivy, which pyspark brings along, fetches them. A file
that is not the recorded one is never used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from watersmeet.errors import ArtifactsError
from watersmeet.jvm.java import java_command, missing_java

log = logging.getLogger("watersmeet")

SPARK: Final = "spark"
BROKER: Final = "broker"
GROUPS: Mapping[str, str] = {SPARK: "Delta Lake for Spark", BROKER: "the embedded broker"}
"""The groups of artifacts, by the names that they have in `ivy.xml` and as folders, and what each
is for.
"""

IVY_FILE: Final = Path(__file__).with_name("ivy.xml")
HASHES: Final = Path(__file__).with_name("ivy.sha256")
"""The file with a line for each artifact, as `sha256sum` writes it, with its path below the folder
of all groups.
"""

SETTINGS: Final = "WATERSMEET_IVY_SETTINGS"
"""The environment variable that names Ivy's settings, for those who fetch from a repository of
their own.
"""

_CONNECT_MS: Final = 20_000
_READ_MS: Final = 120_000


def cache_folder() -> Path:
    """Return the folder of the user's cache in which each group has a folder of its own."""
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "watersmeet", "jars"
    )


def pinned(group: str) -> dict[str, str]:
    """Return the names of a group's files, each with its hash."""
    hashes = {}
    for line in HASHES.read_text(encoding="utf-8").splitlines():
        digest, _, path = line.partition("  ")
        if Path(path).parent.name == group:
            hashes[Path(path).name] = digest
    return hashes


def jars(group: str) -> list[Path]:
    """Return the jars of a group, fetched into the user's cache where they are not there yet.

    Raises ArtifactsError where they cannot be fetched, or where a file is not the recorded one.
    """
    return fetch(group, place_of(group))


def place_of(group: str) -> Path:
    """Return where the folder of a group is: in that of the environment's artifacts, where the
    whole group is there, or else in that of the user's cache.
    """
    installed = Path(sys.prefix, "jars")
    return installed if not _missing(group, installed / group) else cache_folder()


def fetch(group: str, place: Path) -> list[Path]:
    """Fetch what is missing of a group into its folder below `place`, and return all of its files,
    checked against their hashes.

    Raises ArtifactsError where a file cannot be fetched, or is not the recorded one.
    """
    folder = place.expanduser().absolute() / group
    missing = _missing(group, folder)
    if missing:
        log.info("fetching %s: %d files into %s", GROUPS[group], len(missing), folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as new:
                problem = retrieve(IVY_FILE, f"{new}/[artifact]-[revision].[ext]", group)
                new_files = [name for name in missing if Path(new, name).is_file()]
                _check(group, Path(new), new_files, "Ivy's own copy, below ~/.ivy2")
                for name in new_files:
                    Path(new, name).replace(folder / name)
        except OSError as error:
            raise ArtifactsError(
                f"the JVM artifacts of {GROUPS[group]} cannot be written to {folder} "
                f"({error.strerror})",
                fix="name another folder by XDG_CACHE_HOME",
            ) from None
        if missing := _missing(group, folder):
            for name in missing:
                log.warning("missing: %s", folder / name)
            raise ArtifactsError(
                f"{len(missing)} JVM artifacts of {GROUPS[group]} could not be fetched "
                f"({problem or 'Ivy gave others'}): "
                "`watersmeet fetch --into DIR` does it where there is a network, or put the files "
                f"named above into {folder}"
            )
        log.info("%s is there", GROUPS[group])
    names = list(pinned(group))
    _check(group, folder, names, "it")
    return [folder / name for name in names]


def retrieve(ivy_file: Path, pattern: str, group: str | None = None) -> str | None:
    """Have Ivy fetch the artifacts of an Ivy file, or one group of them, to where its `pattern`
    says, and report the progress.

    Returns why that failed, or None. Settings beside the file (`ivysettings.xml`) count, or else
    those that `SETTINGS` names.
    """
    java = java_command()
    if java is None:
        return f"it takes Java 17 or 21, and {missing_java()}"
    ivy = _ivy()
    if ivy is None:
        return (
            "the package pyspark, which has the Ivy that fetches them, is not installed: `pip "
            'install "watersmeet[broker]"`'
        )
    # Without these Java waits for ever for a server that says nothing.
    timeouts = [
        f"-Dsun.net.client.defaultConnectTimeout={_CONNECT_MS}",
        f"-Dsun.net.client.defaultReadTimeout={_READ_MS}",
    ]
    command = [java, *timeouts, "-jar", str(ivy), "-ivy", str(ivy_file), "-retrieve", pattern]
    beside = ivy_file.with_name("ivysettings.xml")
    settings = str(beside) if beside.exists() else os.environ.get(SETTINGS)
    command += ["-settings", settings] if settings else []
    command += ["-confs", group] if group else []
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            lines.append(line.strip())
            if done := re.search(r"\[SUCCESSFUL \] \S+!([^\s(]+)", line):
                log.info("fetched %s", done[1])
    log.debug("Ivy: %s", "\n".join(lines))
    return _problem(lines) if process.returncode else None


def _ivy() -> Path | None:
    """Return the jar of Ivy among those of pyspark."""
    spec = find_spec("pyspark")
    places = spec.submodule_search_locations if spec is not None else None
    return next(
        (jar for place in places or () for jar in sorted(Path(place, "jars").glob("ivy-*.jar"))),
        None,
    )


def _problem(lines: Sequence[str]) -> str:
    """Return the cause that Ivy gives: a server that does not answer, or what was not found, or
    else its last line.
    """
    errors = [re.search(r"^Server access error .*\((.+)\)$", line) for line in lines]
    causes = [error[1] for error in errors if error]
    unknown = [
        line.strip(": ")
        for line in lines
        if line.startswith(":: ") and line.endswith(": not found")
    ]
    return (causes + unknown + [line for line in lines if line][-1:] + ["Ivy said nothing"])[0]


def _missing(group: str, folder: Path) -> list[str]:
    return [name for name in pinned(group) if not (folder / name).is_file()]


def _check(group: str, folder: Path, names: Sequence[str], culprit: str) -> None:
    """Raise ArtifactsError where a file is not the recorded one, with the advice to delete
    `culprit`.
    """
    recorded = pinned(group)
    for name in names:
        if hash_of(folder / name) != recorded[name]:
            raise ArtifactsError(
                f"{folder / name} is not the file that is recorded in {HASHES}",
                fix=f"delete {culprit}, and it is fetched again",
            )


def hash_of(file: Path) -> str:
    """Return the hash of a file as `ivy.sha256` has it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
