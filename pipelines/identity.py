"""What the content of a lake depends on, beside the records: kept when the lake is begun, and compared at every start.

Another timeout, key or topic would make of the same records another result, in part: what was merged before would not agree with
what comes after. So a change is refused, whatever it was meant for; its place is a new lake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress

import orjson

from pipelines import tables
from pipelines.adapters.kafka import Cluster
from pipelines.adapters.lake import Lake, suppress_conflict, wall_clock_ms
from pipelines.errors import ConfigurationError
from pipelines.settings import Settings

_APPLICATION = "watersmeet-configuration"


def identity(settings: Settings, partitions: int) -> dict[str, str]:
    """By dotted path, everything that rows of bronze and silver and the bytes of messages depend on."""
    facts = {
        "partitions": str(partitions),
        "sources": ", ".join(settings.sources),
        "merge.timeout": f"{settings.merge.timeout_ms} ms",
        "merge.max_future": f"{settings.merge.max_future_ms} ms",
        "publish.valid": settings.publish.valid,
        "publish.value": settings.publish.value or "null",
        "publish.max_bytes": str(settings.publish.max_bytes),
    }
    ids = Cluster(settings.kafka).topic_ids([source.topic for source in settings.sources.values()])
    for name, source in settings.sources.items():
        beat = source.heartbeat
        facts |= {
            f"sources.{name}.topic": f"{source.topic} ({ids.get(source.topic, 'missing')})",
            f"sources.{name}.format": source.format,
            f"sources.{name}.schema": _digest(source.schema_path.read_bytes()) if source.schema_path else "null",
            f"sources.{name}.key": source.key or "null",
            f"sources.{name}.event_time": source.event_time,
            f"sources.{name}.heartbeat": "null" if beat is None else f"{beat.field} = {beat.equals!r}",
        }
    return facts


def differences(lake: Lake, facts: Mapping[str, str]) -> list[str]:
    """A sentence for everything that is not as it was when the lake was begun."""
    return _differences(_kept(lake), facts) if lake.exists(tables.CONFIGURATION) else []


def _differences(kept: Mapping[str, str], facts: Mapping[str, str]) -> list[str]:
    return [_difference(field, kept[field], now) for field, now in facts.items() if kept.get(field, now) != now]


def keep_identity(lake: Lake, facts: Mapping[str, str]) -> None:
    """Afterwards the lake holds every fact, as it was first written. Raises ConfigurationError where one differs now."""
    for _ in range(20):
        kept = _kept(lake)
        missing = [(field, value, wall_clock_ms()) for field, value in facts.items() if field not in kept]
        if not missing:
            break
        with suppress_conflict():  # of two first starts, one writes
            lake.append_once(missing, tables.CONFIGURATION, _APPLICATION, len(kept) + len(missing))
    changed = _differences(kept, facts)
    if changed:
        raise ConfigurationError(changed[0] + (f" (and {len(changed) - 1} more changes)" if len(changed) > 1 else ""))


def _kept(lake: Lake) -> dict[str, str]:
    return dict(lake.rows("SELECT field, value FROM {configuration} ORDER BY decided_at DESC"))  # the first stays


def _difference(field: str, before: str, now: str) -> str:
    if field == "partitions":
        return (
            f"sources: the topics have {now} partitions, and had {before} when the lake was begun: keys have moved to other "
            "partitions since, so nothing would meet; begin a new lake, or restore the topics"
        )
    if field.endswith(".topic") and before.rpartition(" ")[0] == now.rpartition(" ")[0]:
        return (
            f"{field}: {now.partition(' ')[0]} was deleted and made again since the lake was begun: its offsets mean other "
            "records now; begin a new lake, or restore the topic"
        )
    return (
        f"{field}: the lake was begun with `{before}`, and `{now}` would make another result of the same records; "
        "set it back, or begin a new lake"
    )


def _digest(schema: bytes) -> str:
    """Of what a schema says, not of how it is written."""
    with suppress(orjson.JSONDecodeError):
        schema = orjson.dumps(orjson.loads(schema), option=orjson.OPT_SORT_KEYS)
    return f"sha256 {hashlib.sha256(schema).hexdigest()[:16]}"
