"""Validity and messages of the rows of silver and of corrections, derived by the user's own
expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.verify_evidence import CorrectionRow, Row
from watersmeet.core.message import as_read, message_bytes, message_values
from watersmeet.core.types import TIME
from watersmeet.lake.epochs import Epoch, Epochs
from watersmeet.settings import Settings

Evaluate: TypeAlias = Callable[[pa.Table, Mapping[str, str]], pa.Table]
"""Function that evaluates the user's SQL expressions over rows of silver.

The expressions are by the name of their column. It returns a row for each row, in their order.
"""


class Validator:
    """Judge of rows of silver and of corrections by the `publish` of their epochs.

    The user's own expressions count where there is something to evaluate them.
    """

    def __init__(
        self, settings: Settings, epochs: Epochs, evaluate: Evaluate | None = None
    ) -> None:
        self.settings = settings
        self.epochs = epochs
        self.evaluate = evaluate
        used = (
            {name for epoch in epochs for name in _expressions(epoch)}
            if evaluate is None
            else set()
        )
        self.unevaluated = [f"publish.{name}" for name in ("valid", "value") if name in used]
        self._knows_messages = "publish.value" not in self.unevaluated

    def evaluated(self, rows: pa.Table) -> pa.Table:
        """Return rows of silver, or alike, with `holds` and `told`: what the predicate says of
        them, and their message's value.
        """
        numbers = self.epochs.numbers_of(rows["batch"].to_numpy())
        rows_by_epoch = [np.flatnonzero(numbers == i) for i in range(len(self.epochs))]
        evaluated = [
            self._evaluated_in_epoch(rows.take(pa.array(row_numbers)), e)
            for row_numbers, e in zip(rows_by_epoch, self.epochs, strict=True)
            if len(row_numbers)
        ]
        if not evaluated:
            return self._evaluated_in_epoch(rows, self.epochs.current)
        return pa.concat_tables(evaluated).take(
            pa.array(np.argsort(np.concatenate(rows_by_epoch), kind="stable"))
        )

    def _evaluated_in_epoch(self, rows: pa.Table, epoch: Epoch) -> pa.Table:
        """Return `evaluated` for rows that the rules of one epoch have judged, or would judge."""
        sources = epoch.settings.sources
        expressions = _expressions(epoch)
        stored = rows
        for name in ("event_time", "last_event_time"):
            stored = stored.set_column(
                stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME)
            )
        holds: Any = pa.repeat(True, rows.num_rows)
        value: Any = None
        if "value" not in expressions:
            value = _values(
                as_read(stored, {name: source.read_type for name, source in sources.items()}),
                list(sources),
            )
        readable = as_read(stored, {name: source.value_type for name, source in sources.items()})
        values = self.evaluate(readable, expressions) if self.evaluate and expressions else None
        if "valid" in expressions:
            holds = (
                pa.nulls(rows.num_rows, pa.bool_())
                if values is None
                else values["valid"].fill_null(False)
            )
        if "value" in expressions:
            value = (
                pa.nulls(rows.num_rows, pa.large_binary())
                if values is None
                else values["value"].cast(pa.large_binary())
            )
        return rows.append_column("holds", holds).append_column("told", value)

    def known_value(self, value: bytes | None) -> dict[str, bytes | None]:
        """Return a message's value by its name; empty where it is not known."""
        return {"value": value} if self._knows_messages else {}

    def right(
        self, row: Row, *, is_closed: bool = False
    ) -> Sequence[tuple[bool | None, str | None]]:
        """Return what `valid` and `invalid_reason` of a row of silver may be: one pair, unless an
        expression was not evaluated.

        `is_closed`: a jump has closed what was valid.
        """
        if row.outcome.status != "timed_out":
            return [(False, "reset") if row.is_finished else (None, None)]
        right = self.validity(row)
        return [
            (False, "reset") if is_closed and valid else (valid, reason) for valid, reason in right
        ]

    def validity(
        self, row: Row | CorrectionRow, header_bytes: int = 0
    ) -> Sequence[tuple[bool, str | None]]:
        """Return what `valid` and `invalid_reason` are where the rules judge a row: one pair,
        unless an expression was not evaluated.

        `header_bytes`: the size of the headers of its message beside those of `message_bytes`.
        """
        beside = len(row.key.encode()), len(row.tenant.encode())
        fits = (
            message_bytes(len(row.value or b""), *beside) + header_bytes
            <= self.epochs.of(row.batch).settings.publish.max_bytes
        )
        sized: list[tuple[bool, str | None]] = [(True, None)] if fits else [(False, "too_large")]
        if not self._knows_messages:
            sized = [(True, None), (False, "too_large")]
        return [
            *([] if row.holds is False else sized),
            *([] if row.holds else [(False, "predicate")]),
        ]


def _expressions(epoch: Epoch) -> dict[str, str]:
    """Return the user's own expressions in an epoch."""
    texts = {"valid": epoch.settings.publish.valid, "value": epoch.settings.publish.value}
    return {name: text for name, text in texts.items() if text is not None and text != "true"}


def _values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message.

    Null for a row that can have none, since something in it is null.
    """
    try:
        return message_values(rows, sources)
    except ValueError:
        if rows.num_rows == 1:
            return pa.chunked_array([pa.nulls(1, pa.large_binary())])
    half = rows.num_rows // 2
    return pa.chunked_array(
        [*_values(rows[:half], sources).chunks, *_values(rows[half:], sources).chunks],
        pa.large_binary(),
    )
