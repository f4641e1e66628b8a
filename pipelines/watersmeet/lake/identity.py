"""Facts of a lake that never change: kept when the lake is begun, and compared at every start.

Another topic or number of partitions would give another result for the same records, which would
not agree with what was merged before. So a change is refused; it needs a new lake. (The rules may
change: `lake.epochs`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from watersmeet.core.texts import identified, topic_and_id
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.lake import tables
from watersmeet.lake.commits import Append
from watersmeet.lake.journal import IDENTITY, MOVED, REBUILD, Decision, decide, read_journal
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
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
    layout = int(reader.properties(tables.SILVER).get(tables.LAYOUT, 0))
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
    names = [
        field
        for field, now in facts.items()
        if field.endswith(".topic") and kept.get(field, now) != now
    ]
    return {
        field: _remade(kept[field], facts[field])
        for field in names
        if _names(kept[field]) == _names(facts[field])
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

    def news(decisions: Iterable[Decision]) -> dict[str, Any] | None:
        kept = facts_of(decisions)
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


def facts_of(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return all facts by name; of one that was decided again, as a topic that moved, the last."""
    kept = dict[str, str]()
    for decision in decisions:
        if decision.kind in (IDENTITY, MOVED, REBUILD):
            kept |= decision.body["facts"]
    return kept


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
