"""Cases with tenants that are late in different ways, and what the merge model makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.support.cases import SOURCES, Case, as_record, heartbeat, keyed, rules_of
from watersmeet.core.idle import IdleDecision
from watersmeet.core.model import PartitionMerge, Record
from watersmeet.lake import tables
from watersmeet.lake.table_reader import TableReader, Where

TENANTS = ("x", "y/1 %", "\u00e9", "\U0001f600")
"""In the order of their UTF-8 bytes, which is not that of UTF-16."""

LENGTHS = (10, 40, 80)
"""Of a case, in records."""

Row = tuple[Any, ...]
Window = tuple[int, int | None, int | None]
"""Gap, max and lag in ms; no lag where there are no tenants."""


def merge_of(rules: Window) -> dict[str, Any]:
    """The rules as a configuration has them under `merge`."""
    gap_ms, max_ms, lag_ms = rules
    window: dict[str, Any] = (
        {"timeout": f"{gap_ms}ms"}
        if max_ms is None
        else {"window": {"gap": f"{gap_ms}ms", "max": f"{max_ms}ms"}}
    )
    if lag_ms is None:
        return window
    return {**window, "tenant": "g", "tenant_max_lag": f"{lag_ms}ms"}


def tenant_case(seed: int, gap_ms: int = 100, lengths: Sequence[int] = LENGTHS) -> Case:
    """Tenants with delays of their own, ties, disorder, silence, heartbeats of a tenant and of
    everybody."""
    rng = random.Random(seed)
    tenants = rng.sample(TENANTS, rng.randint(1, len(TENANTS)))
    delays = {tenant: rng.choice([0, 0, 20, gap_ms, 5 * gap_ms, 20 * gap_ms]) for tenant in tenants}
    values: dict[str, list[bytes | None]] = {source: [] for source in SOURCES}
    times = dict.fromkeys(SOURCES, 25 * gap_ms)
    arrivals = rng.choices(SOURCES, k=rng.choice(lengths))
    for source in arrivals:
        times[source] += rng.choice([0, 0, 1, 7, 30, gap_ms, 3 * gap_ms])
        tenant, roll = rng.choice(tenants), rng.random()
        time = max(
            0, times[source] - delays[tenant] - rng.choice([0, 0, 0, 1, 30, gap_ms, 3 * gap_ms])
        )
        if roll < 0.1:
            values[source].append(
                heartbeat(times[source]) if roll < 0.03 else heartbeat(time, g=tenant)
            )
        else:
            values[source].append(keyed(rng.choice("ab"), time, g=tenant, n=len(values[source])))
    return Case(values, gap_ms, arrivals)


def tenant_cases(count: int, lengths: Sequence[int] = LENGTHS) -> dict[int, Case]:
    """A partition each."""
    return {p: tenant_case(p, lengths=lengths) for p in range(count)}


def case_of_records(records: Iterable[Record]) -> Case:
    """Records and decisions of the idle policy, in the order of arrival, as they stand in Kafka and
    the lake, at new offsets."""
    case = Case({source: [] for source in SOURCES}, 100)
    for record in records:
        mine, tenant = (
            case.values[record.input.source],
            {} if record.tenant is None else {"g": record.tenant},
        )
        if record.tenant_times is not None:
            tenant_times = tuple(sorted(record.tenant_times.items()))
            case.decisions.setdefault(record.input.source, []).append(
                IdleDecision(len(mine) - 1, record.event_time, tenant_times)
            )
            continue
        case.arrivals.append(record.input.source)
        beat = heartbeat(record.event_time, **tenant)
        mine.append(beat if record.key is None else keyed(record.key, record.event_time, **tenant))
    return case


class TenantModels:
    """The merge model of each partition. What arrives is cut where the rules change, and nowhere
    else.

    `begins`: by source and partition the first offset that is merged.
    """

    def __init__(
        self,
        cases: Mapping[int, Case],
        rules: Window,
        begins: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.cases, self.begins = cases, begins or {}
        self.models = {p: PartitionMerge(rules_of(SOURCES, *rules)) for p in cases}
        self._arrived = dict.fromkeys(cases, 0)

    def arrive(self, share: float) -> None:
        """The next records of every case, up to this share of all."""
        for p, case in self.cases.items():
            until = max(self._arrived[p], round(share * len(case.arrivals)))
            for i in range(self._arrived[p], until):
                source = case.arrivals[i]
                offset = case.arrivals[:i].count(source)
                record = as_record(source, offset, case.values[source][offset])
                if record is not None and offset >= self.begins.get((source, p), 0):
                    self.models[p].arrive(record)
            self._arrived[p] = until
            self.models[p].advance()

    def begin_epoch(self, rules: Window) -> None:
        """From now on the window and the lag are others."""
        for model in self.models.values():
            model.begin_epoch(*rules)

    def silver(self) -> list[Row]:
        """In the form of `silver_of`."""
        rows: list[Row] = []
        for p, model in self.models.items():
            for status, records in (("open", model.open.values()), ("timed_out", model.timed_out)):
                for r in records:
                    is_open = status == "open"
                    due = model.rules.due(r.event_time, r.last_event_time) if is_open else r.due
                    closed_at = None if is_open else r.closed_at
                    parts = sorted(
                        (source, part.offset) for source, mine in r.parts.items() for part in mine
                    )
                    of_record = r.event_time, r.last_event_time, due, closed_at, None
                    rows.append((p, r.tenant, r.key, status, *of_record, parts))
            for position, record in model.waiting:
                waits = (
                    record.event_time,
                    record.event_time,
                    None,
                    None,
                    position,
                    [(record.input.source, record.offset)],
                )
                rows.append((p, record.tenant, record.key, "waiting", *waits))
        return sorted(rows, key=repr)

    def late(self) -> list[Row]:
        """In the form of `late_of`."""
        found = [(p, each) for p, model in self.models.items() for each in model.late]
        return sorted(
            (
                p,
                e.record.input.source,
                e.record.offset,
                e.record.tenant,
                e.record.key,
                e.record.event_time,
                e.position,
            )
            for p, e in found
        )

    def order(self) -> dict[int, list[Row]]:
        """By partition what is published, in order: closed at, tenant, due, key. What an epoch
        closes as it begins waits until the clock has moved.
        """
        found: dict[int, list[Row]] = {}
        for p, model in self.models.items():
            rows = [(r.closed_at, r.tenant, r.due, r.key) for r in model.published_order()]
            found[p] = [row for row in rows if row[0] <= (model.clock or 0)]
        return found


def silver_of(
    reader: TableReader, sources: Sequence[str] = SOURCES, generation: int | None = None
) -> list[Row]:
    """Silver's content with tenants: partition, tenant, key, status, times, position and where its
    parts come from."""
    columns = [
        "partition",
        "tenant",
        "merge_key",
        "status",
        "event_time",
        "last_event_time",
        "due",
        "closed_at",
        "position",
    ]
    where = [
        [*term, ("status", "in", ["open", "waiting", "timed_out"])]
        for term in _of(generation) or [[]]
    ]
    rows = reader.select(tables.SILVER, [*columns, *sources], where).to_pylist()
    return sorted(
        (
            (
                *(row[name] for name in columns),
                sorted((s, part["offset"]) for s in sources for part in row[s]),
            )
            for row in rows
        ),
        key=repr,
    )


def late_of(reader: TableReader, generation: int | None = None) -> list[Row]:
    """What is late with tenants."""
    columns = ["partition", "source", "offset", "tenant", "merge_key", "event_time", "position"]
    return sorted(
        tuple(row.values())
        for row in reader.select(tables.LATE, columns, _of(generation)).to_pylist()
    )


def _of(generation: int | None) -> Where:
    return () if generation is None else [[("generation", "=", generation)]]
