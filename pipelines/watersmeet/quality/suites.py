"""Suites of expectations: Watersmeet's own promises, and the user's.

A suite is a JSON file of Great Expectations: `name`, `expectations` (each with `type`, `kwargs`
and, for people, `description`), and in `meta` the table or view that it is about: `{"table":
"merged"}`. `bronze` stands for the table of every source.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from watersmeet.configuration.file import known_instead
from watersmeet.dev.init import schemas_directory
from watersmeet.errors import ConfigurationError, Problem, lines_of, missing_package
from watersmeet.lake import tables
from watersmeet.lake.views import views
from watersmeet.settings import Settings

SINK: Final = "sink"
"""The name by which a suite calls the messages of the sink."""

BRONZE: Final = "bronze"
"""The name by which a suite calls the tables of all sources."""

PROMISES: Final = tuple(
    f"{name}_promises" for name in ("bronze", "silver", "waiting", "late", "sink")
)
"""Watersmeet's own suites, by the names of their files. `waiting` is for tenants alone."""


@dataclass(frozen=True)
class Suite:
    """The expectations of a `table` (its name in the lake, or `SINK`), from a `file`."""

    name: str
    table: str
    documents: tuple[Mapping[str, Any], ...]
    """The expectations, as JSON has them."""
    file: str

    @cached_property
    def expectations(self) -> list[Any]:
        """As Great Expectations knows them; raises ConfigurationError for one that it does not."""
        return [self._made(number, document) for number, document in enumerate(self.documents)]

    def _made(self, number: int, document: Mapping[str, Any]) -> Any:
        load_great_expectations()
        from great_expectations.exceptions.exceptions import GreatExpectationsError
        from great_expectations.expectations.expectation_configuration import (
            ExpectationConfiguration,
        )

        try:
            # A result has the `meta` of its expectation: so it is known which one it is about.
            configuration = {**document, "meta": {**(document.get("meta") or {}), PLACE: number}}
            return ExpectationConfiguration(**configuration).to_domain_obj()
        except (GreatExpectationsError, ValueError, TypeError) as error:
            reason = "; ".join(lines_of(error))
        fault = (
            f"expectations[{number}], {document.get('type')}: {reason}; correct it as Great "
            "Expectations' gallery has it"
        )
        raise ConfigurationError(fault, where=self.file)


PLACE: Final = "watersmeet_place"
"""The name, in `meta`, by which an expectation keeps its number within its suite."""


def sentence_of(document: Mapping[str, Any]) -> str:
    """Return what an expectation says: its description, or else its type and what it is about."""
    if document.get("description"):
        return str(document["description"])
    arguments = [f"{name}: {json.dumps(value)}" for name, value in document["kwargs"].items()]
    return f"{document['type']} ({', '.join(arguments)})"


def load_great_expectations() -> None:
    """Import Great Expectations, which takes seconds. Raises MissingPackageError."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    try:
        from great_expectations.data_context.types.base import ProgressBarsConfig
    except ImportError as error:
        raise missing_package(error) or error from None
    # This module logs every temporary folder, at a level of its own.
    logging.getLogger(ProgressBarsConfig.__module__).setLevel(logging.WARNING)


def read_suites(settings: Settings) -> list[Suite]:
    """Return every suite, Watersmeet's own first. Raises ConfigurationError for another file."""
    suites: list[Suite] = []
    for name in PROMISES:
        if name == "waiting_promises" and not settings.merge.has_tenants:
            continue
        file = schemas_directory() / "promises" / f"{name}.json"
        for suite in _suites(file.read_bytes(), str(file), settings):
            documents = [document for document in suite.documents if _is_meant(document, settings)]
            documents += _expectations_of(suite.table, settings)
            suites.append(replace(suite, documents=tuple(documents)))
    for user_file in settings.quality.suites:
        user_suites = _suites(user_file.text, str(user_file.path), settings)
        if repeated := {suite.name for suite in suites} & {suite.name for suite in user_suites}:
            what = f"there are two suites called `{repeated.pop()}`"
            fault = Problem(what, "name", "give each a name of its own")
            raise _refusal(str(user_file.path), fault)
        suites += user_suites
    return suites


def checked_views(settings: Settings) -> list[str]:
    """Return the views that a suite may be about."""
    hidden = [] if tables.has_corrections(settings) else [tables.CORRECTIONS]
    return [
        name
        for name, view in views(settings).items()
        if name not in hidden and ("batch" in view.schema.names or name == tables.QUARANTINE)
    ]


def _suites(text: bytes, file: str, settings: Settings) -> list[Suite]:
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        fault = Problem(f"is not JSON ({error})", fix="write a suite of Great Expectations")
        raise _refusal(file, fault) from None
    if (wrong := _fault(document, settings)) is not None:
        raise _refusal(file, wrong)
    table = (document.get("meta") or {}).get("table", tables.SILVER)
    names = [tables.bronze(source) for source in settings.sources] if table == BRONZE else [table]
    return [Suite(document["name"], name, tuple(document["expectations"]), file) for name in names]


def _refusal(file: str, fault: Problem) -> ConfigurationError:
    return ConfigurationError(f"{file}: {fault._replace(fix='')}", fix=fault.fix)


def _fault(document: Any, settings: Settings) -> Problem | None:
    if not isinstance(document, dict):
        return Problem("is not a JSON object", fix="write a suite of Great Expectations")
    if not isinstance(document.get("name"), str) or not document["name"].strip():
        return Problem("is missing or no text", "name", "give the suite a name")
    expectations = document.get("expectations")
    if not isinstance(expectations, list) or not expectations:
        return Problem("is missing or empty", "expectations", "list one or more expectations")
    for number, expectation in enumerate(expectations):
        if (
            not isinstance(expectation, dict)
            or not isinstance(expectation.get("type"), str)
            or not isinstance(expectation.get("kwargs"), dict)
        ):
            fix = "write an object with `type` and `kwargs`"
            return Problem("is no expectation", f"expectations[{number}]", fix)
    meta = document.get("meta") or {}
    if not isinstance(meta, dict):
        fix = 'name the table in it, such as {"table": "silver"}'
        return Problem("is no object", "meta", fix)
    bronze_tables = map(tables.bronze, settings.sources)
    names = [BRONZE, *bronze_tables, tables.SILVER, *checked_views(settings), SINK]
    table = meta.get("table", tables.SILVER)
    if table not in names:
        instead = known_instead(str(table), names)
        return Problem(f"`{table}` is no table that is checked", "meta.table", instead)
    return None


def _is_meant(document: Mapping[str, Any], settings: Settings) -> bool:
    # In the `meta` of Watersmeet's own expectations, `tenants` is true where they are for
    # configurations with tenants, and false for those without; so is `topics` for several topics of
    # a source.
    hidden = settings.hidden_names
    own = {"tenants": "tenant" not in hidden, "topics": "topic" not in hidden}
    return all(document.get("meta", {}).get(name, has_it) == has_it for name, has_it in own.items())


def _expectations_of(table: str, settings: Settings) -> Iterator[Mapping[str, Any]]:
    # Those of Watersmeet's own that depend on the configuration.
    if table == tables.MERGED:
        not_null = "expect_column_values_to_not_be_null"
        for name in settings.sources:
            yield _expectation("expect_column_to_exist", f"the column {name} exists", column=name)
            yield _expectation(not_null, f"{name} is never null", column=name)
    if table == SINK and settings.publish.delivery != "at_least_once":
        kind = "expect_compound_columns_to_be_unique"
        columns = {"column_list": ["partition", "seq"], "ignore_row_if": "never"}
        yield _expectation(kind, "partition and seq together are unique", **columns)


def _expectation(kind: str, sentence: str, **kwargs: Any) -> Mapping[str, Any]:
    return {"type": kind, "kwargs": kwargs, "description": sentence}
