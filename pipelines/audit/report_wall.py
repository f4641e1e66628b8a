"""The report's questions about wall time: when Watersmeet did what, and how long it took. All times are epoch ms.

The lake may be written to meanwhile: what lies beyond the steps that were laid out first is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.report_steps import Steps, in_each, span, steps_over
from pipelines.settings import Settings

STEPS = 240
"""So many steps at most, for what has a value at every time."""

RATE_STEPS = 120
"""So many at most, for what is counted in a step: in narrower ones, a batch and the pause after it would be seen as spikes."""

HELD, IDLE = "held", "idle"
_WAITS = "head IS NOT NULL AND (clock IS NULL OR head > clock)"
"""A head beyond the clock is that of a record which the batch has seen and left: so one waits at least."""


class ClockAt(NamedTuple):
    """A partition's clock after the last batch up to `at`; None where it has none (after a jump)."""

    partition: int
    at: int
    clock: int | None


class LeadIn(NamedTuple):
    """How far a source was ahead of the clock at most, in the step from `at` on, in ms."""

    source: str
    partition: int
    at: int
    lead: int


class Stretch(NamedTuple):
    """From `since` to `until` a source of a partition was `held` or `idle`, to the width of a step."""

    source: str
    partition: int
    kind: str
    since: int
    until: int


class CountIn(NamedTuple):
    """So many of something in the step from `at` on."""

    of: str
    at: int
    total: int


class DelayIn(NamedTuple):
    """The shortest, the mean and the longest of the delays (ms) in the step from `at` on."""

    of: str
    at: int
    least: int
    mean: int
    most: int


class WallTime(NamedTuple):
    """What was done when: `steps` holds for what has a value at every time, `rate_steps` for what is counted or averaged."""

    steps: Steps
    rate_steps: Steps
    clocks: Sequence[ClockAt]
    leads: Sequence[LeadIn]
    stretches: Sequence[Stretch]
    merged: Sequence[CountIn]
    published: Sequence[CountIn]
    ages: Sequence[DelayIn]
    merges: Sequence[DelayIn]
    to_silver: Sequence[DelayIn]
    to_gold: Sequence[DelayIn]


def read_wall_time(lake: Lake, settings: Settings, shown: Sequence[int]) -> WallTime | None:
    """Of the `shown` partitions what is told by partition, of all the rest; None while no batch is noted."""
    found = span(
        [
            *lake.rows_if_any("SELECT MIN(committed_at), MAX(committed_at) FROM {progress}"),
            *lake.rows_if_any("SELECT MIN(committed_at), MAX(committed_at) FROM {published}"),
            *lake.rows_if_any("SELECT MIN(decided_at), MAX(decided_at) FROM {idle_heartbeats}"),
        ]
    )
    if found is None:
        return None
    steps, rate_steps = steps_over(*found, STEPS), steps_over(*found, RATE_STEPS, narrowest=1000)
    return WallTime(
        steps,
        rate_steps,
        clocks(lake, steps, shown),
        leads(lake, rate_steps, shown),
        held(lake, steps, shown) + idle(lake, steps, shown),
        merged(lake, rate_steps, list(settings.sources)),
        published(lake, rate_steps),
        ages(lake, rate_steps),
        merge_times(lake, rate_steps),
        [delay for source in settings.sources for delay in delays_to_silver(lake, rate_steps, source)],
        delays_to_gold(lake, rate_steps),
    )


def clocks(lake: Lake, steps: Steps, shown: Sequence[int]) -> list[ClockAt]:
    """The clocks after the last batch of every step that has one; a batch has a row for every topic-partition."""
    step = _step(lake, steps)
    found = lake.rows_if_any(
        f"SELECT p.`partition`, ends.step, MAX(p.clock) FROM {{progress}} p "
        f"JOIN (SELECT {step} AS step, MAX(batch) AS batch FROM {{progress}} GROUP BY {step}) ends ON p.batch = ends.batch "
        f"WHERE {_among('p.`partition`', shown)} GROUP BY p.`partition`, ends.step ORDER BY p.`partition`, ends.step",
    )
    return [ClockAt(partition, at + steps.width, clock) for partition, at, clock in found if at in steps.starts]


def leads(lake: Lake, steps: Steps, shown: Sequence[int]) -> list[LeadIn]:
    """The largest lead of every step that has a batch."""
    step = _step(lake, steps)
    found = lake.rows_if_any(
        f"SELECT source, `partition`, {step} AS step, MAX({lake.in_ms('head')} - {lake.in_ms('clock')}) FROM {{progress}} "
        f"WHERE clock IS NOT NULL AND head IS NOT NULL AND {_among('`partition`', shown)} "
        f"GROUP BY source, `partition`, {step} ORDER BY source, `partition`, step",
    )
    return [lead for lead in (LeadIn(*row) for row in found) if lead.at in steps.starts]


def held(lake: Lake, steps: Steps, shown: Sequence[int]) -> list[Stretch]:
    """When a source's records waited for another source: in the steps that have a batch in which they did, and on up to the
    next batch where they did in a step's last one.
    """
    step, waits = _step(lake, steps), f"CASE WHEN {_WAITS} THEN 1 ELSE 0 END"
    found = lake.rows_if_any(
        # Of the larger number, the remainder is the last batch's.
        f"SELECT source, `partition`, {step} AS step, MAX({waits}), MAX(batch * 2 + {waits}) % 2 FROM {{progress}} "
        f"WHERE {_among('`partition`', shown)} GROUP BY source, `partition`, {step}",
    )
    by_place: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    for source, partition, at, any_waited, last_waited in found:
        by_place.setdefault((source, partition), {})[at] = any_waited, last_waited
    stretches = []
    for (source, partition), known in sorted(by_place.items()):
        marked, goes_on = set(), 0
        for start in steps.starts:
            waited, goes_on = known.get(start, (goes_on, goes_on))
            if waited:
                marked.add(start)
        stretches += _joined(source, partition, HELD, marked, steps)
    return stretches


def idle(lake: Lake, steps: Steps, shown: Sequence[int]) -> list[Stretch]:
    """The steps in which the idle policy spoke for a source."""
    step = steps.of(lake.in_ms("decided_at"))
    found = lake.rows_if_any(
        f"SELECT source, `partition`, {step} AS step FROM {{idle_heartbeats}} "
        f"WHERE {_among('`partition`', shown)} GROUP BY source, `partition`, {step}",
    )
    by_place: dict[tuple[str, int], set[int]] = {}
    for source, partition, at in found:
        if at in steps.starts:
            by_place.setdefault((source, partition), set()).add(at)
    return [s for place, marked in sorted(by_place.items()) for s in _joined(*place, IDLE, marked, steps)]


def merged(lake: Lake, steps: Steps, sources: Sequence[str]) -> list[CountIn]:
    """The offsets that silver passed, by source; a jump passes none."""
    step = _step(lake, steps)
    found = lake.rows_if_any(
        f"SELECT source, {step} AS step, SUM(until_offset - from_offset) FROM {{progress}} "
        f"WHERE reason IS NULL GROUP BY source, {step}",
    )
    known = {source: {at: count for name, at, count in found if name == source} for source in sources}
    return [CountIn(source, at, count) for source in sources if found for at, count in in_each(steps, known[source])]


def published(lake: Lake, steps: Steps) -> list[CountIn]:
    """The messages that gold published."""
    step = _step(lake, steps)
    found = lake.rows_if_any(
        f"SELECT {step} AS step, SUM(last_seq - first_seq + 1) FROM {{published}} WHERE first_seq <= last_seq GROUP BY {step}",
    )
    known: Mapping[int, int] = dict(found)
    return [CountIn("published", at, count) for at, count in in_each(steps, known)] if found else []


def ages(lake: Lake, steps: Steps) -> list[DelayIn]:
    """How far the clocks were behind wall time when a batch was decided, over all partitions."""
    age = f"{lake.in_ms('committed_at')} - {lake.in_ms('clock')}"
    delays = f"SELECT {age} AS delay, {_step(lake, steps)} AS step FROM {{progress}} WHERE clock IS NOT NULL"
    return _delays(lake, steps, "clock", delays)


def merge_times(lake: Lake, steps: Steps) -> list[DelayIn]:
    """From the `progress` of a batch, so when it was decided, to its commit to silver, where that is noted."""
    delay = f"{lake.in_ms('v.committed_at')} - {lake.in_ms('p.committed_at')}"
    delays = (
        f"SELECT {delay} AS delay, {_step(lake, steps, 'p.')} AS step FROM {{versions}} v "
        "JOIN (SELECT batch, MIN(committed_at) AS committed_at FROM {progress} GROUP BY batch) p ON p.batch = v.batch"
    )
    return _delays(lake, steps, "merge", delays)


def delays_to_silver(lake: Lake, steps: Steps, source: str) -> list[DelayIn]:
    """From Kafka's timestamp of the last record that a batch passed in a topic-partition to that batch's `progress`."""
    delay = f"{lake.in_ms('p.committed_at')} - {lake.in_ms('b.kafka_timestamp')}"
    delays = (
        f"SELECT {delay} AS delay, {_step(lake, steps, 'p.')} AS step FROM {{progress}} p JOIN {{{tables.bronze(source)}}} b "
        "ON b.`partition` = p.`partition` AND b.`offset` = p.until_offset - 1 "
        f"WHERE p.source = '{source}' AND p.until_offset > p.from_offset AND p.reason IS NULL"
    )
    return _delays(lake, steps, source, delays)


def delays_to_gold(lake: Lake, steps: Steps) -> list[DelayIn]:
    """From the `progress` of the batch in which the last record of a publication timed out to the row of the publication."""
    delay = f"{lake.in_ms('p.committed_at')} - {lake.in_ms('b.committed_at')}"
    delays = (
        f"SELECT {delay} AS delay, {_step(lake, steps, 'p.')} AS step FROM {{published}} p JOIN {{silver}} s "
        "ON s.`partition` = p.`partition` AND s.merge_key = p.last_key AND s.event_time = p.last_event_time "
        "JOIN (SELECT batch, MIN(committed_at) AS committed_at FROM {progress} GROUP BY batch) b ON b.batch = s.batch "
        # After a jump back a record may be merged once more, long after it was published.
        "WHERE s.status = 'timed_out' AND s.valid AND b.committed_at <= p.committed_at"
    )
    return _delays(lake, steps, "silver to gold", delays)


def _delays(lake: Lake, steps: Steps, of: str, delays: str) -> list[DelayIn]:
    found = lake.rows_if_any(
        f"SELECT step, MIN(delay), AVG(delay), MAX(delay) FROM ({delays}) AS delays GROUP BY step ORDER BY step"
    )
    return [DelayIn(of, at, least, round(mean), most) for at, least, mean, most in found if at in steps.starts]


def _step(lake: Lake, steps: Steps, of: str = "") -> str:
    return steps.of(lake.in_ms(f"{of}committed_at"))


def _among(column: str, partitions: Sequence[int]) -> str:
    return f"{column} IN ({', '.join(map(str, partitions))})" if partitions else "1 = 0"


def _joined(source: str, partition: int, kind: str, marked: set[int], steps: Steps) -> list[Stretch]:
    """Neighbouring steps as one stretch."""
    stretches: list[Stretch] = []
    for start in sorted(marked):
        if stretches and stretches[-1].until == start:
            stretches[-1] = stretches[-1]._replace(until=start + steps.width)
        else:
            stretches.append(Stretch(source, partition, kind, start, start + steps.width))
    return stretches
