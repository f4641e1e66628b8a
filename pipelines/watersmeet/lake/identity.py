"""What a lake has kept of its configuration, compared at every start with the one that it has now.

Facts that never change are kept when the lake is begun. Another topic or number of partitions would
give another result for the same records, which would not agree with what was merged before. So a
change is refused; it needs a new lake. Rules may change, by `watersmeet evolve`: each set of them
begins an epoch (`lake.history`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from watersmeet.configuration.sources import spelled, written
from watersmeet.core.texts import identified, topic_and_id
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.lake import tables
from watersmeet.lake.commits import Append
from watersmeet.lake.features import alter
from watersmeet.lake.history import Epochs, epoch_body, facts_of
from watersmeet.lake.journal import IDENTITY, MOVED, RULES, decide, read_journal
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader, row_count
from watersmeet.settings import Settings

REBUILD_GENERATION: Final = "rebuild.generation"
"""Fact of a rebuild, from its beginning on: the generation that it derives again."""

REBUILD_BATCH: Final = "rebuild.batch"
"""Fact of a complete rebuild: the last batch that it repeats."""


def check_layout(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where this version, as configured, cannot continue the tables.

    - Their layout is another one.
    - They are a rebuild, whose bronze is another lake's.
    - The lake was begun with other sources, topics or tenants than the configuration has.
    """
    if reader.exists(tables.SILVER):
        _check_layout_version(reader, lake)
    kept = kept_facts(reader)
    if kept.keys() & {REBUILD_GENERATION, REBUILD_BATCH}:
        raise ConfigurationError(
            f"{lake.location} is a rebuild, and not a lake",
            where="lake",
            fix="name the lake that it was derived from, or an empty place",
        )
    if changed := [
        *_differences(kept, {"sources": ", ".join(lake.settings.sources)}),
        *_other_topics(kept, lake.settings),
        *_differences(kept, _tenants(lake.settings)),
    ]:
        raise ConfigurationError(*changed[0])


def check_begun(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where no lake has begun at the location."""
    if not reader.exists(tables.SILVER):
        raise ConfigurationError(
            f"no lake has begun at {lake.location}",
            where="lake",
            fix="name another place, or run first",
        )


def _check_layout_version(reader: TableReader, lake: Lake) -> None:
    said = reader.properties(tables.SILVER).get(tables.LAYOUT, "0")
    if not re.fullmatch(r"[0-9]{1,9}", said):
        raise ConfigurationError(
            f"{tables.SILVER} has {tables.LAYOUT}={said}, which somebody has set, and which is no "
            "layout",
            where="lake",
            fix=(
                f"set it back to what it was (this version writes {tables.LAYOUT_VERSION}): "
                f"{alter(lake, tables.SILVER)} SET TBLPROPERTIES "
                f"('{tables.LAYOUT}' = '{tables.LAYOUT_VERSION}')"
            ),
        )
    layout = int(said)
    if layout > tables.LAYOUT_VERSION:
        raise ConfigurationError(
            f"{lake.location} has layout {layout}, and this version of Watersmeet knows "
            f"layout {tables.LAYOUT_VERSION}",
            where="lake",
            fix="use the version that wrote it, or a later one",
        )
    if layout < tables.LAYOUT_VERSION:
        raise ConfigurationError(
            f"{lake.location} was made by an earlier version of Watersmeet, whose tables "
            "this one does not continue: name an empty place, where `kafka.start: sink` goes "
            "on after the sink's last messages (if they say too little, it says so: then "
            "publish to another topic), and keep this lake to look at",
            where="lake",
        )


def identity(settings: Settings, partitions: int, topic_ids: Mapping[str, str]) -> dict[str, str]:
    """Return, by dotted path, the facts of a lake that never change.

    They are what rows of bronze and silver depend on, and the `name` by which Kafka keeps a second
    publisher out.

    `topic_ids`: Kafka's identity of each source's topic that exists; a topic that was made again
    has another one.
    """
    facts = {"partitions": str(partitions)}
    for name, source in settings.sources.items():
        facts[f"sources.{name}.topic"] = ", ".join(
            identified(topic, topic_ids.get(topic, "missing")) for topic in source.topics
        )
    return {**configured_identity(settings), **facts}


def configured_identity(settings: Settings) -> dict[str, str]:
    """Return those facts of `identity` that the configuration alone says."""
    facts = {"name": settings.name, "sources": ", ".join(settings.sources)}
    for name, source in settings.sources.items():
        is_in_registry = ", with a registry" if source.registry else ""
        facts[f"sources.{name}.format"] = f"{source.format}{is_in_registry}"
    return {**facts, **_tenants(settings)}


def _other_topics(kept: Mapping[str, str], settings: Settings) -> Iterator[Problem]:
    for name, source in settings.sources.items():
        before = kept.get(field := f"sources.{name}.topic")
        if before is not None and _names(before) != list(source.topics):
            yield _difference(field, ", ".join(_names(before)), ", ".join(source.topics))


def _tenants(settings: Settings) -> dict[str, str]:
    paths = dict.fromkeys(settings.sources, "") | settings.tenant_paths
    return {f"sources.{name}.tenant": path for name, path in paths.items()}


def differences(reader: TableReader, facts: Mapping[str, str]) -> list[Problem]:
    """Return a problem for everything that is not as it was when the lake was begun.

    Nothing for a lake that was not begun yet.
    """
    return _differences(kept_facts(reader), facts)


def remade_topics(kept: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the topics that kept their names but have another identity now.

    They are listed by the fact of their source. Sources whose topics have other names than before
    are left out.
    """
    return {
        field: _remade(kept[field], now)
        for field, now in facts.items()
        if field.endswith(".topic") and kept.get(field, now) != now
        if _names(kept[field]) == _names(now)
    }


def keep_identity(reader: TableReader, append: Append, facts: Mapping[str, str]) -> None:
    """Make sure that the lake holds every fact.

    Raises ConfigurationError where one differs from what the lake held.
    """
    keep_facts(reader, append, facts)
    check_identity(kept_facts(reader), facts)


def keep_facts(
    reader: TableReader, append: Append, facts: Mapping[str, str], kind: str = IDENTITY
) -> None:
    """Keep the facts that the lake does not hold yet; those of topics that have `MOVED` in place of
    what it holds.
    """

    def news() -> dict[str, Any] | None:
        kept = kept_facts(reader)
        new = {
            field: fact
            for field, fact in facts.items()
            if field not in kept or (kind == MOVED and kept[field] != fact)
        }
        return {"facts": new} if new else None

    decide(reader, append, kind, news)


def kept_facts(reader: TableReader) -> dict[str, str]:
    """Return, by name, everything that the lake was begun with, or that was noted since."""
    return facts_of(read_journal(reader))


def kept_topic_ids(reader: TableReader) -> dict[str, str]:
    """Return, by topic of the sources, Kafka's identity of it as the lake has it."""
    facts = kept_facts(reader).items()
    of_sources = (_ids(fact) for field, fact in facts if field.endswith(".topic"))
    return {name: topic_id for ids in of_sources for name, topic_id in ids.items()}


def check_identity(kept: Mapping[str, str], facts: Mapping[str, str]) -> None:
    """Raise ConfigurationError where a fact differs from what the lake was begun with (`kept`)."""
    if changed := _differences(kept, facts):
        what, where, fix = changed[0]
        more = f" (and {len(changed) - 1} more changes)" if len(changed) > 1 else ""
        raise ConfigurationError(what, where, fix + more)


def _differences(kept: Mapping[str, str], facts: Mapping[str, str]) -> list[Problem]:
    return [
        _difference(field, kept[field], now)
        for field, now in facts.items()
        if kept.get(field, now) != now
    ]


def _difference(field: str, before: str, now: str) -> Problem:
    if field == "name":
        return Problem(
            f"the lake was begun as `{before}`, and as `{now}` Kafka would no longer keep a second "
            "publisher out",
            field,
            "set it back",
        )
    if field == "partitions":
        return Problem(
            f"the topics have {now} partitions, and had {before} when the lake was begun: keys "
            "have moved to other partitions since, so nothing would meet",
            "sources",
            "begin a new lake, or restore the topics",
        )
    if field.endswith(".topic") and _names(before) == _names(now):
        return Problem(
            f"{' and '.join(_remade(before, now))} was deleted and made again since the lake was "
            "begun, and does not have the last records of bronze: its offsets mean other records "
            "now",
            field,
            "begin a new lake, or restore the topic",
        )
    if field.endswith(".tenant"):
        was, would_be = (
            f"with tenants at `{path}`" if path else "without tenants" for path in (before, now)
        )
        return Problem(
            f"the lake was begun {was}, and {would_be} it would be another merge",
            field,
            "set it back, or begin a new lake",
        )
    return Problem(
        f"the lake was begun with `{before}`, and `{now}` would make another result of the same "
        "records",
        field,
        "set it back, or begin a new lake",
    )


def _remade(before: str, now: str) -> list[str]:
    former = _ids(before)
    return [name for name, topic_id in _ids(now).items() if former.get(name) != topic_id]


def _names(fact: str) -> list[str]:
    return [*_ids(fact)]


def _ids(fact: str) -> dict[str, str]:
    """Return Kafka's identity of each topic of a source; empty of one that a fact does not say."""
    return dict(map(topic_and_id, fact.split(", ")))


def changes(epochs: Epochs, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the rules that differ, by dotted path: (in the lake's last epoch, in the settings).

    They are as lakes record them.
    """
    before = epochs.current.settings.rules()
    now = settings.rules()
    return {
        field: (before[field], now[field])
        for field in now
        if not _is_same(field, before[field], now[field])
    }


def rerouted(settings: Settings, changed: Collection[str]) -> list[str]:
    """Return the repartitioned sources whose records the changed rules may reroute.

    The partition of a record depends on every rule by which the record is read.
    """
    general = ("kafka.max_record_bytes", "merge.max_future")
    return [
        name
        for name in settings.repartitioned
        if any(field in general or field.startswith(f"sources.{name}.") for field in changed)
    ]


def _is_same(field: str, before: Any, now: Any) -> bool:
    """Return True where two rules are the same. In a schema, the order of names does not count."""
    if field.endswith(".schema") and isinstance(before, str) and isinstance(now, str):
        before, now = json.loads(before), json.loads(now)
    return _text(before) == _text(now)


def _text(rules: Any) -> str:
    """Return rules as JSON, in which 1, 1.0 and true differ."""
    return json.dumps(rules, sort_keys=True)


def check_rules(epochs: Epochs, settings: Settings, repartitioned: str | None = None) -> None:
    """Raise ConfigurationError where the settings' rules are not those of the lake's last epoch.

    `repartitioned`: only those by which this source is read.
    """
    changed = {
        field: rules
        for field, rules in changes(epochs, settings).items()
        if repartitioned is None or repartitioned in rerouted(settings, [field])
    }
    if not changed:
        return
    fix = (
        "`watersmeet evolve` says what would change, and `watersmeet evolve --apply` records it; "
        "or set it back"
    )
    for field, (before, now) in changed.items():
        if now == {"all_of": before}:  # a list meant the first that is there, once
            fix += f" (`{field.rpartition('.')[2]}: {spelled(written(before))}`)"
    raise ConfigurationError(
        "the lake has other rules than this configuration", where=", ".join(changed), fix=fix
    )


def may_begin_anew(reader: TableReader, epochs: Epochs, settings: Settings) -> bool:
    """Return True where the settings' rules differ from the lake's, but change nothing that exists.

    That is so where no record was read yet and no column depends on the rules that differ.
    """
    changed = changes(epochs, settings)
    if not changed or any(field.endswith(".schema") for field in changed):
        return False
    with_rows = [tables.SILVER, *map(tables.bronze, settings.sources)]
    existing = [table for table in with_rows if reader.exists(table)]
    return not any(row_count(reader, table) for table in existing)


def begin_epoch(reader: TableReader, append: Append, settings: Settings, from_batch: int) -> None:
    """Record the settings' rules as the next epoch of a lake without an owner.

    Such a lake has no batch yet, or is being rebuilt.
    """
    decide(reader, append, RULES, lambda: epoch_body(settings, _count(reader), from_batch))


def keep_first_epoch(reader: TableReader, append: Append, settings: Settings) -> None:
    """Record the first epoch of a lake that has none."""
    first = epoch_body(settings, 0, 0)
    decide(reader, append, RULES, lambda: None if _count(reader) else first)


def _count(reader: TableReader) -> int:
    return sum(decision.kind == RULES for decision in read_journal(reader))
