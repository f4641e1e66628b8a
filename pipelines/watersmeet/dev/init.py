"""The example to start from: a commented configuration, records to try it with, and the schemas and
suites that it names.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

import watersmeet
from watersmeet.core.json_schema import value_schema
from watersmeet.core.message_schema import message_schema
from watersmeet.errors import ConfigurationError

PACKAGE = Path(watersmeet.__file__).parent
_SCHEMAS: Final = ("orders.json", "tracking.json")
_SUITES: Final = tuple(
    f"{name}.json" for name in ("completeness", "event_times", "fields", "freshness", "quarantine")
)


_EMBEDDED: Final = "engine: embedded                      # not the default"
_SPARK: Final = "engine: spark                         # the default"
"""The line of the template, and the one that replaces it for Spark."""

_SPARK_IS_THERE: Final = (
    "DATABRICKS_RUNTIME_VERSION",
    "PYSPARK_GATEWAY_PORT",
    "SPARK_REMOTE",
    "SPARK_HOME",
    "MASTER",
)
"""Environment variables that name a Spark: of Databricks, spark-submit, Spark Connect, a folder and
a master. (A Python package alone may be there for anything.)
"""


class Choice(NamedTuple):
    """An engine, and why it is Spark."""

    engine: str
    reason: str | None


def choose_engine() -> Choice:
    """Return Spark where the environment names one, else the embedded engine."""
    named = [f"{name} is set" for name in _SPARK_IS_THERE if os.environ.get(name)]
    if "--master" in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
        named.append("PYSPARK_SUBMIT_ARGS names a master")
    return Choice("spark", named[0]) if named else Choice("embedded", None)


def write_example(directory: Path, engine: str = "embedded") -> list[Path]:
    """Write all files of the example to `directory`, or none: nothing that exists is overwritten.

    `engine`: the one that the configuration names. Returns the paths of the files, the
    configuration first. Raises ConfigurationError where one already exists or the folder cannot be
    written to.
    """
    texts = {
        directory / name: source.read_text(encoding="utf-8")
        for name, source in _example_files().items()
    }
    if engine == "spark":
        texts[directory / "watersmeet.yml"] = texts[directory / "watersmeet.yml"].replace(
            _EMBEDDED, _SPARK
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
    """Return what was written, for people: a line for each file, and one for the engine where the
    environment chose it.
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
