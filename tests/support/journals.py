"""Rows of a lake's journal, written as no command writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from deltalake import write_deltalake

from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import Generation, generation_body
from watersmeet.lake.journal import BEGIN, Decision, next_seq
from watersmeet.lake.location import Lake
from watersmeet.lake.tables import Table


def decisions_of(generations: Iterable[Generation]) -> list[Decision]:
    """Generations as they are decided."""
    return [
        Decision(0, BEGIN, each.number, generation_body(each), each.decided_at, 0)
        for each in generations
    ]


def journal_rows(decisions: Iterable[Decision], seq: int = 1) -> pa.Table:
    """Decisions as rows, numbered from `seq` on."""
    rows = [
        (number, decision.kind, decision.generation, json.dumps(decision.body), *decision[4:])
        for number, decision in enumerate(decisions, seq)
    ]
    return Table(tables.JOURNAL, tables.DECISION).rows(rows)


def decided(lake: Lake, kind: str, body: Mapping[str, Any], at_ms: int = 0) -> None:
    """A decision at a time, in a journal that may not exist yet."""
    reader = DeltaRsReader(lake)
    seq = next_seq(reader) if reader.exists(tables.JOURNAL) else 1
    rows = journal_rows([Decision(0, kind, None, body, at_ms, 0)], seq)
    write_deltalake(lake.address(tables.JOURNAL), rows, mode="append")
