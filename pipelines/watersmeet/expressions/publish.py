"""`publish.valid` and `publish.value` as functions of rows of silver."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import lengths, one_chunk
from watersmeet.core.message import message_bytes
from watersmeet.core.too_large import has_no_parts
from watersmeet.errors import Problem
from watersmeet.expressions import MESSAGE, PREDICATE, Outcome, evaluate, expression_problem
from watersmeet.settings import Settings

CONTENT: Final = ("partition", "tenant", "merge_key", "event_time", "last_event_time")
"""The columns of silver that an expression may read, beside one for each source."""

log = logging.getLogger("watersmeet")


@dataclass(frozen=True)
class Expressions:
    """The expressions of a configuration, or of an epoch; None for what every record has."""

    valid: str | None
    value: str | None
    max_bytes: int
    columns: tuple[str, ...]

    @classmethod
    def of(cls, settings: Settings, max_bytes: int | None = None) -> Expressions:
        """Return the expressions of some settings; with another size of a message, where given."""
        publish = settings.publish
        return cls(
            None if publish.valid == "true" else publish.valid,
            publish.value,
            publish.max_bytes if max_bytes is None else max_bytes,
            (*CONTENT, *settings.sources),
        )

    def problems(self, silver: pa.Schema) -> list[Problem]:
        """Return what is wrong with the expressions over these columns of silver."""
        content = pa.schema([silver.field(name) for name in self.columns])
        problems = []
        for name, text, kinds, words in (
            ("valid", self.valid, PREDICATE, "a boolean"),
            ("value", self.value, MESSAGE, "a text or a blob"),
        ):
            if text is not None and (what := expression_problem(text, content, kinds)):
                fix = f"write an expression over {', '.join(self.columns)} that gives {words}"
                problems.append(Problem(what, f"publish.{name}", fix))
        return problems

    def validated(self, rows: pa.Table) -> pa.Table:
        """Return rows of silver whose finished ones are judged: `valid`, and the `invalid_reason`.

        It is `predicate` where `valid` is not true, `expression` where that is by an error, and
        else `too_large` where the message has more than `max_bytes` bytes. All others keep the
        reason that they had, and so do merge records without parts, which are too large themselves.
        """
        if self.valid is None and self.value is None:
            return rows
        is_finished = pc.fill_null(pc.equal(rows["status"], "timed_out"), False)
        is_too_large = pc.fill_null(pc.equal(rows["invalid_reason"], "too_large"), False)
        if pc.any(is_too_large).as_py():  # itself, or its message
            is_small = pa.array(~has_no_parts(rows, self.columns[len(CONTENT) :]))
            is_finished = pc.and_(is_finished, pc.or_(is_small, pc.invert(is_too_large)))
        finished = rows.select([*self.columns, "invalid_reason"])
        if not pc.all(is_finished).as_py():  # else a copy of all records
            finished = finished.filter(is_finished)
        reasons = self.refusals(finished)
        reasons = pc.coalesce(reasons, finished["invalid_reason"])
        if self.value is not None:
            values = self.messages(finished).values
            texts = (values, finished["merge_key"], finished["tenant"])
            is_too_large = pa.array(message_bytes(*map(lengths, texts)) > self.max_bytes)
            reasons = pc.if_else(
                pc.and_(pc.is_null(reasons), is_too_large), pa.scalar("too_large"), reasons
            )
        judged = {"valid": pc.is_null(reasons), "invalid_reason": reasons}
        for name, values in judged.items():
            place = rows.column_names.index(name)
            field = rows.schema.field(name)
            column = pc.replace_with_mask(
                one_chunk(rows[name]), one_chunk(is_finished), one_chunk(values).cast(field.type)
            )
            rows = rows.set_column(place, field, column)
        return rows

    def refusals(self, rows: pa.Table) -> pa.ChunkedArray:
        """Return for each row why `valid` refuses it (`predicate`, `expression`), or null."""
        if self.valid is None:
            return pa.chunked_array([pa.nulls(len(rows), pa.string())])
        outcome = evaluate(self.valid, rows.select(self.columns), PREDICATE)
        refused = pc.if_else(
            pc.fill_null(outcome.values, False), pa.scalar(None, pa.string()), "predicate"
        )
        return pc.if_else(outcome.failed, "expression", refused)

    def messages(self, rows: pa.Table) -> Outcome:
        """Return the `value` of each row's message (large_binary); null where it fails."""
        return evaluate(self.value or "", rows.select(self.columns), MESSAGE)

    def warn_of(self, judged: pa.Table) -> None:
        """Log that `valid` fails for some of the rows that `validated` has judged, if it does."""
        failing = judged.filter(pc.equal(judged["invalid_reason"], "expression"))
        if len(failing):
            is_judged = pc.equal(judged["status"], "timed_out")
            self.warn(failing.slice(0, 1), len(failing), pc.sum(is_judged).as_py())

    def warn(self, failing: pa.Table, failed: int, judged: int) -> None:
        """Log that `valid` fails for so many merge records, and why for the first of these rows."""
        error = evaluate(self.valid or "", failing.select(self.columns), PREDICATE).error
        warn("publish.valid", failed, judged, error)


def warn(name: str, failed: int, judged: int, error: str | None) -> None:
    """Log that an expression fails for some merge records, if it does.

    For the process that decides about a batch: nobody reads what a task of Spark logs.
    """
    if error is not None:
        log.warning("%s fails for %d of %d merge records: %s", name, failed, judged, error)
