"""This machine's Java, and the pinned JVM artifacts: Delta Lake for Spark, and Kafka's broker.

`jars.lock` names each file by its Maven coordinates, with its hash. `make install` puts them into
the folder `jars` of a clone's environment; else they are fetched into the user's cache when they
are first needed. A file that is not the recorded one is never used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit
from xml.etree import ElementTree

from watersmeet.errors import ArtifactsError

if TYPE_CHECKING:
    from jgo.maven import MavenContext

log = logging.getLogger("watersmeet")

SPARK: Final = "spark"
BROKER: Final = "broker"
GROUPS: Mapping[str, str] = {SPARK: "Delta Lake for Spark", BROKER: "the embedded broker"}
"""What each group of artifacts (a name in `jars.lock`, a folder and an extra) is for."""

LOCK: Final = Path(__file__).with_name("jars.lock")
"""The file with each artifact's hash, as `sha256sum` writes it, group and coordinates."""

REPOSITORY: Final = "WATERSMEET_MAVEN_REPOSITORY"
"""The environment variable that names the Maven repository to fetch from, by its URL."""

_AT_ONCE: Final = 8
_TRIES: Final = 3
_SILENCE_S: Final = 60
"""How long a repository may say nothing."""


class Artifact(NamedTuple):
    """A file of a Maven repository, by its coordinates, with its hash."""

    digest: str
    organisation: str
    module: str
    version: str
    extension: str = "jar"
    classifier: str = ""

    @property
    def name(self) -> str:
        """Return the name of its file."""
        parts = [self.module, self.version, *([self.classifier] if self.classifier else [])]
        return f"{'-'.join(parts)}.{self.extension}"


def cache_folder() -> Path:
    """Return the folder of the user's cache in which each group has a folder of its own."""
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "watersmeet", "jars"
    )


def groups(lock: Path) -> list[str]:
    """Return the groups of a lock."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys(line.split()[1].partition("/")[0] for line in lines))


def pinned(group: str, lock: Path = LOCK) -> dict[str, Artifact]:
    """Return the artifacts of a group, by the names of their files."""
    artifacts = []
    for line in lock.read_text(encoding="utf-8").splitlines():
        digest, _, place = line.partition("  ")
        of_group, _, coordinates = place.partition("/")
        if of_group == group:
            artifacts.append(Artifact(digest, *coordinates.split(":")))
    return {artifact.name: artifact for artifact in artifacts}


def jars(group: str) -> list[Path]:
    """Return the jars of a group, fetched if they are missing, or raise ArtifactsError."""
    return fetch(group, place_of(group))


def place_of(group: str) -> Path:
    """Return where a group's folder is: in the environment, if it is whole there, or the cache."""
    installed = Path(sys.prefix, "jars")
    return installed if not _missing(pinned(group), installed / group) else cache_folder()


def fetch(group: str, place: Path, lock: Path = LOCK) -> list[Path]:
    """Fetch what is missing of a group into its folder below `place`; return its checked files.

    Raises ArtifactsError where a file cannot be fetched, or is not the recorded one.
    """
    folder = place.expanduser().absolute() / group
    artifacts, what = pinned(group, lock), GROUPS.get(group, group)
    if missing := _missing(artifacts, folder):
        log.info("fetching %s: %d files into %s", what, len(missing), folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as new:
                problem = _download([artifacts[name] for name in missing], Path(new), folder)
        except OSError as error:
            raise ArtifactsError(
                f"the JVM artifacts of {what} cannot be written to {folder} ({error.strerror})",
                fix="name another folder by XDG_CACHE_HOME",
            ) from None
        if missing := _missing(artifacts, folder):
            for name in missing:
                log.warning("missing: %s", folder / name)
            raise ArtifactsError(
                f"{len(missing)} JVM artifacts of {what} could not be fetched ({problem}): "
                "`watersmeet fetch --into DIR` does it where there is a network, or put the files "
                f"named above into {folder}"
            )
        log.info("%s is there", what)
    for name, artifact in artifacts.items():
        if hash_of(folder / name) != artifact.digest:
            raise ArtifactsError(
                f"{folder / name} is not the file that is recorded in {lock}",
                fix="delete it, and it is fetched again",
            )
    return [folder / name for name in artifacts]


def _missing(names: Iterable[str], folder: Path) -> list[str]:
    return [name for name in names if not (folder / name).is_file()]


def hash_of(file: Path) -> str:
    """Return the hash of a file as `jars.lock` has it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _download(artifacts: list[Artifact], new: Path, folder: Path) -> str | None:
    # By way of an empty folder. Returns why a file is not there, or None.
    try:
        from jgo.maven import MavenContext
    except ImportError:
        return (
            "the package jgo, which fetches them, is not installed: `pip install "
            '"watersmeet[broker]"`'
        )
    maven = MavenContext(repo_cache=new, remote_repos=_repository(), timeout=_SILENCE_S)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        problems = threads.map(partial(_take, maven, folder), artifacts)
        return next((problem for problem in problems if problem is not None), None)


def _take(maven: MavenContext, folder: Path, artifact: Artifact) -> str | None:
    project = maven.project(artifact.organisation, artifact.module)
    component = project.at_version(artifact.version)
    requested = component.artifact(artifact.classifier, artifact.extension)
    problem = None
    for _ in range(_TRIES):
        try:
            file = requested.resolve()
        except OSError as error:
            if error.errno is not None:  # of this machine, not of requests
                raise
            problem = f"{_host(maven)} does not answer: {_cause(error)}"
            (maven.repo_cache / requested.component.path_prefix / requested.filename).unlink(
                missing_ok=True
            )
            continue
        except RuntimeError:  # jgo's, for any other answer
            return f"{_host(maven)} does not have {artifact.name}"
        if hash_of(file) != artifact.digest:
            return f"{_host(maven)} gives another {artifact.name} than the recorded one"
        file.replace(folder / artifact.name)
        log.info("fetched %s", artifact.name)
        return None
    return problem


def _host(maven: MavenContext) -> str:
    return ", ".join(urlsplit(url).hostname or url for url in maven.remote_repos.values())


def _cause(error: BaseException) -> str:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return getattr(error, "strerror", None) or type(error).__name__


def _repository() -> dict[str, str] | None:
    # The environment's, or the mirror of Maven's own settings; None for Maven Central.
    url = os.environ.get(REPOSITORY) or _mirror(Path("~/.m2/settings.xml").expanduser())
    return {"repository": url.rstrip("/")} if url else None


def _mirror(settings: Path) -> str | None:
    try:
        mirrors = ElementTree.parse(settings).iterfind(".//{*}mirror")
    except (OSError, ElementTree.ParseError):
        return None
    for mirror in mirrors:
        of = (mirror.findtext("{*}mirrorOf") or "").replace(" ", "").split(",")
        if {"*", "external:*", "central"} & {*of} and "!central" not in of:
            return (mirror.findtext("{*}url") or "").strip() or None
    return None


def java_command() -> str | None:
    """Return the program `java` of JAVA_HOME, or else of the PATH; None where there is none."""
    java_home = os.environ.get("JAVA_HOME")
    return shutil.which(str(Path(java_home, "bin", "java")) if java_home else "java")


def missing_java() -> str:
    """Say where no Java was found."""
    java_home = os.environ.get("JAVA_HOME")
    if not java_home:
        return "no java is on the PATH"
    return f"JAVA_HOME is {java_home}, and no bin/java is there"
