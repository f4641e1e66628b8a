"""No rows are rows, too: every function of rows gives columns of the same types for none of them.

Spark takes a column for what its type says, and an Arrow array of nothing has none of its own.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import watersmeet.core
import watersmeet.running
from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, one_of
from tests.laws.test_beginnings import test_a_lost_lake_is_taken_up_from_the_sink as lost_lake
from tests.laws.test_gold_corrections import corrected_lake, given_cases, publish
from tests.support.cases import cases_with_ids
from tests.support.configurations import IDS
from tests.support.tenants import merge_of, tenant_cases
from watersmeet.lake.history import read_history
from watersmeet.running.published_parts import offsets_out

kind = one_of([QUICK, SPARK_FOLDER])

Tried = dict[str, list[str]]

NEEDS_ROWS = {
    "clocks_of": "a plan counts on the records that it has seen",
    "_clocks": "the same",
    "_is_of_key": "asks about one of one record or more",
    "_on_time": "has rows that are in no table, as the next ones",
    "_corrections": "has numbers of rows",
    "_with_places": "the same",
    "_too_many": "the same",
    "with_validity": "has a reason for each row",
    "_headers": "has the facts of each row",
    "_with": "has the number of a row",
}
"""Functions that are not tried, and why."""


def emptied(value: Any) -> Any:
    """The same without any row; what has no rows as it is."""
    if isinstance(value, pa.Table | pa.ChunkedArray | pa.Array):
        return value.slice(0, 0)
    if isinstance(value, np.ndarray):
        return value[:0]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(emptied, value))
    if isinstance(value, list | tuple) and any(isinstance(item, pa.Table) for item in value):
        return type(value)(map(emptied, value))
    return value


def kinds(value: Any) -> Any:
    """The types of all columns that a result has."""
    if isinstance(value, pa.Table):
        return [(field.name, field.type) for field in value.schema]
    if isinstance(value, pa.ChunkedArray | pa.Array):
        return value.type
    if isinstance(value, tuple):
        return [kinds(item) for item in value]
    if is_dataclass(value):
        return [kinds(getattr(value, field.name)) for field in fields(value)]
    return None


def functions_of_rows() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of the layers that take rows, and return rows or columns."""
    for package in (watersmeet.core, watersmeet.running):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            own = import_module(module.name)
            for name, function in vars(own).items():
                if inspect.isfunction(function) and function.__module__ == own.__name__:
                    hints = {str(hint) for hint in inspect.get_annotations(function).values()}
                    if any("pa." in hint or hint == "Settled" for hint in hints):
                        yield name, function


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    """By function: what is wrong with its result for no rows. Each is tried whenever it is called,
    with what it is called with, but no row."""
    found: dict[str, list[str]] = {}

    def wrapper(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def both(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            of_none = [emptied(arg) for arg in args]
            if name not in NEEDS_ROWS and kinds(result) is not None:
                problems = found.setdefault(f"{function.__module__}.{name}", [])
                try:
                    nothing = function(*of_none, **{k: emptied(v) for k, v in kwargs.items()})
                    if kinds(nothing) != kinds(result):
                        problems.append(f"{kinds(nothing)} instead of {kinds(result)}")
                except Exception as error:
                    problems.append(repr(error))
            return result

        return both

    wrapped = {id(f): wrapper(name, f) for name, f in functions_of_rows()}
    for module in [m for name, m in sys.modules.items() if name.startswith("watersmeet.")]:
        for name, value in list(vars(module).items()):
            if id(value) in wrapped:
                monkeypatch.setattr(module, name, wrapped[id(value)])
    return found


def test_every_function_of_rows_takes_no_rows(
    new_lake: MakeLake, kafka: str, kind: str, tried: Tried
) -> None:
    lake = corrected_lake(new_lake, kafka, f"no-rows-{kind}", cases_with_ids(given_cases()), **IDS)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
        publish(lake)
    generations = read_history(lake.reader, lake.settings).generations
    offsets_out(lake.reader, lake.settings, generations, {})
    with_tenants = new_lake(tenant_cases(4), merge=merge_of((100, 250, 300)))
    with_tenants.arrive()
    with_tenants.merge()
    lost_lake(new_lake, kafka, f"no-rows-{kind}")
    assert {name: problems for name, problems in tried.items() if problems} == {}
    core = {"corrections.correct", "merge.merge", "message.message_values"}
    core |= {"repeated.joined", "sequence._texts"}
    running = {"correcting.validated_corrections"}
    if kind == QUICK:  # with Spark, its workers call them
        running |= {"published_parts._published"}
    expected = {f"watersmeet.core.{name}" for name in core}
    assert expected | {f"watersmeet.running.{name}" for name in running} <= tried.keys()
