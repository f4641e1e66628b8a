"""The example to start from: a configuration, records to try it with, its schemas and suites."""

import errno
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

# Variables of Databricks, spark-submit and Spark Connect, of a folder and of a master. (A Python
# package alone may be there for anything.)
_SPARK_IS_THERE: Final = (
    *("DATABRICKS_RUNTIME_VERSION", "PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"),
    *("SPARK_HOME", "MASTER"),
)


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
    """Write all files of the example to `directory`, or none, and return their paths.

    `engine`: the one that the configuration, which comes first, names. Raises ConfigurationError
    where a file already exists or the folder cannot be written to.
    """
    texts = {directory / name: file.read_text("utf-8") for name, file in _example_files().items()}
    configuration = directory / "watersmeet.yml"
    if engine == "spark":
        texts[configuration] = texts[configuration].replace(_EMBEDDED, _SPARK)
    texts[directory / "schemas" / "merged.json"] = _schema_of_messages()
    fix = "name another folder, or move it away"
    if existing := [str(path) for path in texts if path.exists() or path.is_symlink()]:
        raise ConfigurationError("already exists; it was kept", ", ".join(existing), fix)
    for folder in sorted({path.parent for path in texts} - {directory}):
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            raise ConfigurationError("is no folder", folder, fix)
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise _unwritable(folder, os.strerror(errno.EACCES))
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error.strerror) from error
    return list(texts)


def _unwritable(folder: Path, reason: str | None) -> ConfigurationError:
    return ConfigurationError(f"cannot be written to ({reason})", folder, "name a folder that can")


def init_view(facts: Mapping[str, Any]) -> str:
    """Return a line for each file, and one for the engine where the environment chose it."""
    engine = f"engine: {facts['engine']}, since {facts['reason']}"
    return "\n".join([*facts["written"], *([engine] if facts["reason"] else [])])


def schemas_directory() -> Path:
    """Return the folder of schemas and suites: the package's, or the repository's."""
    packaged = PACKAGE / "_schemas"
    return packaged if packaged.is_dir() else PACKAGE.parents[1] / "schemas"


def _schema_of_messages() -> str:
    files = {source: schemas_directory() / f"{source}.json" for source in ("tracking", "orders")}
    schemas = {source: value_schema(file.read_bytes(), file) for source, file in files.items()}
    return orjson.dumps(message_schema(schemas), option=orjson.OPT_INDENT_2).decode() + "\n"


def _example_files() -> dict[str, Path]:
    schemas = schemas_directory()
    templates = PACKAGE / "dev" / "templates"
    return {
        **{name: templates / name for name in ("watersmeet.yml", "examples.jsonl")},
        **{f"schemas/{name}": schemas / name for name in _SCHEMAS},
        **{f"expectations/{name}": schemas / "expectations" / name for name in _SUITES},
    }
