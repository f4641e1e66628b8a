"""How Python names what is Scala's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pyspark.sql import SparkSession

NONE = "scala.None"


def scala_object(spark: SparkSession, name: str) -> Any:
    """The object (a class's companion, or None) of this name; a TypeError where there is none."""
    return getattr(spark._jvm, f"{name}$").__getattr__("MODULE$")


def some(spark: SparkSession, value: Any) -> Any:
    """Scala's option of a value."""
    return scala_object(spark, "scala.Option").apply(value)


def scala_list(spark: SparkSession, items: Iterable[Any]) -> Any:
    """Scala's list of some values."""
    found = scala_object(spark, "scala.collection.immutable.List").empty()
    for item in reversed(list(items)):
        found = found.prepended(item)
    return found
