"""The permissions that the user of a pipeline needs on a Kafka with access control, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple

from watersmeet.configuration.sources import SourceSettings
from watersmeet.settings import Settings


class Permission(NamedTuple):
    """An operation that is allowed on one resource; READ and WRITE of a topic include DESCRIBE."""

    operation: str
    kind: Literal["topic", "group", "transactional id"]
    name: str
    why: str


def transactional_id(name: str, topic: str, role: str = "") -> str:
    """Return the id of the one publisher to a topic that a pipeline has, or has in a `role`.

    No name and no topic has a slash, so it separates them; a hyphen would be ambiguous.
    """
    if role or "-" in name or "-" in topic:
        return "watersmeet-" + "/".join(filter(None, (name, role, topic)))
    return f"watersmeet-{name}-{topic}"


_SEQUENCE = "gold reads where the sequence stands; a lost lake is taken up from it"
_LETTERS = "gold reads up to where dead letters are out"
_LAG = "for Kafka's own tools, shows how far it is"


def permissions(settings: Settings) -> list[Permission]:
    """Return the permissions for all that a pipeline does in Kafka, each once."""
    name = settings.name
    needed = [Permission("READ", "topic", topic, "bronze reads it") for topic in settings.topics]
    for topic in settings.publish.sequence_topics:
        needed += _written_topic(name, topic, _SEQUENCE, "gold publishes")
    for layer in ("bronze", "silver"):
        needed.append(Permission("READ", "group", f"watersmeet-{name}-{layer}", _LAG))
    for source in settings.sources.values():
        needed += _repartition_permissions(name, source)
    for topic in settings.publish.dead_letter_topics.values():
        needed += _written_topic(name, topic, _LETTERS, "gold sends dead letters")
    if settings.publish.dead_letter_topics:
        why = "a topic of dead letters takes what it takes"
        needed += [Permission("DESCRIBE_CONFIGS", "topic", topic, why) for topic in settings.topics]
    return list(dict.fromkeys(needed))


def _written_topic(name: str, topic: str, read_because: str, work: str) -> list[Permission]:
    transactions = transactional_id(name, topic)
    return [
        Permission("READ", "topic", topic, read_because),
        Permission("WRITE", "topic", topic, work),
        Permission("CREATE", "topic", topic, "gold creates it where it is missing"),
        Permission("DESCRIBE_CONFIGS", "topic", topic, "`validate` looks at its settings"),
        Permission("WRITE", "transactional id", transactions, f"{work} in transactions"),
    ]


def _repartition_permissions(name: str, source: SourceSettings) -> list[Permission]:
    if source.repartition is None:
        return []
    [topic] = source.topics
    origins = source.repartition.from_topics
    transactions = transactional_id(name, topic, "repartition")
    takes = "the repartitioned topic takes what it takes"
    return [
        *(Permission("READ", "topic", origin, "`repartition` reads it") for origin in origins),
        *(Permission("DESCRIBE_CONFIGS", "topic", origin, takes) for origin in origins),
        Permission("WRITE", "topic", topic, "`repartition` writes it"),
        Permission("CREATE", "topic", topic, "`repartition` creates it where it is missing"),
        Permission("DESCRIBE_CONFIGS", "topic", topic, "`validate` looks at its settings"),
        Permission(
            "WRITE", "transactional id", transactions, "`repartition` writes in transactions"
        ),
        Permission("READ", "group", f"watersmeet-{name}-repartition", _LAG),
    ]
