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
    """Return the id of the one publisher to a topic that a pipeline has, or has in a `role`; no
    other publisher has it.

    No name and no topic has a slash, so it separates them; a hyphen would leave open where one of
    them ends.
    """
    if role or "-" in name or "-" in topic:
        return "watersmeet-" + "/".join(filter(None, (name, role, topic)))
    return f"watersmeet-{name}-{topic}"


_SEQUENCE = "gold reads where the sequence stands; a lost lake is taken up from it"
_LETTERS = "gold reads up to where dead letters are out"


def permissions(settings: Settings) -> list[Permission]:
    """Return the permissions for all that the pipeline of a configuration does in Kafka, each once,
    and no others.
    """
    name = settings.name
    dead_letter_topics = settings.publish.dead_letter_topics.values()
    needed = [
        *(Permission("READ", "topic", topic, "bronze reads it") for topic in settings.topics),
        *(
            permission
            for topic in settings.publish.sequence_topics
            for permission in _written_topic(name, topic, _SEQUENCE, "gold publishes")
        ),
        *(
            Permission(
                "READ",
                "group",
                f"watersmeet-{name}-{layer}",
                "for Kafka's own tools, shows how far it is",
            )
            for layer in ("bronze", "silver")
        ),
        *(
            permission
            for source in settings.sources.values()
            for permission in _repartition_permissions(name, source)
        ),
        *(
            permission
            for topic in dead_letter_topics
            for permission in _written_topic(name, topic, _LETTERS, "gold sends dead letters")
        ),
        *(
            Permission(
                "DESCRIBE_CONFIGS", "topic", topic, "a topic of dead letters takes what it takes"
            )
            for topic in settings.topics
            if dead_letter_topics
        ),
    ]
    return list(dict.fromkeys(needed))


def _written_topic(name: str, topic: str, read_because: str, work: str) -> list[Permission]:
    """Return the permissions for a topic that gold writes in transactions, and reads for a reason.

    `work`: what gold does there.
    """
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
    return [
        *(Permission("READ", "topic", origin, "`repartition` reads it") for origin in origins),
        *(
            Permission(
                "DESCRIBE_CONFIGS", "topic", origin, "the repartitioned topic takes what it takes"
            )
            for origin in origins
        ),
        Permission("WRITE", "topic", topic, "`repartition` writes it"),
        Permission("CREATE", "topic", topic, "`repartition` creates it where it is missing"),
        Permission("DESCRIBE_CONFIGS", "topic", topic, "`validate` looks at its settings"),
        Permission(
            "WRITE",
            "transactional id",
            transactional_id(name, topic, "repartition"),
            "`repartition` writes in transactions",
        ),
        Permission(
            "READ",
            "group",
            f"watersmeet-{name}-repartition",
            "for Kafka's own tools, shows how far it is",
        ),
    ]
