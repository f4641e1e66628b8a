"""The example to start from: a commented configuration, records to try it with, and the schemas and
suites that it names.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

import watersmeet
from watersmeet.core.json_schema import value_schema
from watersmeet.core.message_schema import message_schema
from watersmeet.errors import ConfigurationError, MissingPackageError
from watersmeet.jvm.java import java_problem

PACKAGE = Path(watersmeet.__file__).parent
_SCHEMAS: Final = ("orders.json", "tracking.json")
_SUITES: Final = tuple(
    f"{name}.json" for name in ("completeness", "event_times", "fields", "freshness", "quarantine")
)


_ENGINE: Final = (
    "engine: spark                         # or embedded: one process without a JVM, a lake with a "
    "path"
)
"""The line of the template that `_EMBEDDED` replaces for the other engine."""
_EMBEDDED: Final = (
    "engine: embedded                      # one process without a JVM; or spark: any lake"
)


class Choice(NamedTuple):
    """An engine that can run here, and why it is not Spark."""

    engine: str
    reason: str | None


def choose_engine() -> Choice:
    """Return Spark where it can run here, else the embedded engine."""
    missing = next(
        (name for name in ("pyspark", "delta", "pandas") if find_spec(name) is None), None
    )
    if missing is not None:
        return Choice("embedded", str(MissingPackageError(missing, "spark")))
    problem = None if "SPARK_REMOTE" in os.environ else java_problem()
    if problem is not None:
        return Choice("embedded", f"Spark needs Java 17 or 21, and {problem}")
    return Choice("spark", None)


def write_example(directory: Path, engine: str = "spark") -> list[Path]:
    """Write all files of the example to `directory`, or none: nothing that exists is overwritten.

    `engine`: the one that the configuration names. Returns the paths of the files, the
    configuration first. Raises ConfigurationError where one already exists or the folder cannot be
    written to.
    """
    texts = {
        directory / name: source.read_text(encoding="utf-8")
        for name, source in _example_files().items()
    }
    if engine == "embedded":
        texts[directory / "watersmeet.yml"] = texts[directory / "watersmeet.yml"].replace(
            _ENGINE, _EMBEDDED
        )
    texts[directory / "schemas" / "merged.json"] = _schema_of_messages()
    existing = [path for path in texts if path.exists() or path.is_symlink()]
    if existing:
        names = ", ".join(str(path) for path in existing)
        raise ConfigurationError(
            "already exists; it was kept", where=names, fix="name another folder, or move it away"
        )
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot be written to ({error.strerror})",
            where=directory,
            fix="name a folder that can",
        ) from error
    return list(texts)


def init_view(facts: Mapping[str, Any]) -> str:
    """Return what was written, for people: a line for each file, and one for the engine where it is
    not Spark.
    """
    engine = f"engine: {facts['engine']}, since {facts['reason']}"
    return "\n".join([*facts["written"], *([engine] if facts["reason"] else [])])


def schemas_directory() -> Path:
    """Return the folder of the example's schemas and all suites: inside an installed package, else
    at the top of the repository.
    """
    packaged = PACKAGE / "_schemas"
    return packaged if packaged.is_dir() else PACKAGE.parents[1] / "schemas"


def _schema_of_messages() -> str:
    files = {source: schemas_directory() / f"{source}.json" for source in ("tracking", "orders")}
    schemas = {source: value_schema(file.read_bytes(), file) for source, file in files.items()}
    return orjson.dumps(message_schema(schemas), option=orjson.OPT_INDENT_2).decode() + "\n"


def _example_files() -> dict[str, Path]:
    """Return where each file of the example comes from, by its path in the folder that it is
    written to.
    """
    schemas = {f"schemas/{name}": schemas_directory() / name for name in _SCHEMAS}
    suites = {
        f"expectations/{name}": schemas_directory() / "expectations" / name for name in _SUITES
    }
    templates = {
        name: PACKAGE / "dev" / "templates" / name for name in ("watersmeet.yml", "examples.jsonl")
    }
    return {**templates, **schemas, **suites}
