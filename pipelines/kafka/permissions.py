"""What the user of a pipeline must be allowed on a Kafka with access control, and why."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipelines.settings import Settings


class Permission(NamedTuple):
    """An operation that is allowed on one resource; READ and WRITE of a topic include DESCRIBE."""

    operation: str
    kind: Literal["topic", "group", "transactional id"]
    name: str
    why: str


def permissions(settings: Settings) -> list[Permission]:
    """All that the pipeline of a configuration does in Kafka, each once, and nothing else."""
    sink, name = settings.publish.topic, settings.name
    return [
        *(Permission("READ", "topic", source.topic, "bronze reads it") for source in settings.sources.values()),
        Permission("READ", "topic", sink, "gold reads where the sequence stands; a lost lake is taken up from it"),
        Permission("WRITE", "topic", sink, "gold publishes"),
        Permission("CREATE", "topic", sink, "gold creates it where it is missing"),
        Permission("DESCRIBE_CONFIGS", "topic", sink, "`validate` looks at its settings"),
        Permission("WRITE", "transactional id", f"watersmeet-{name}-{sink}", "gold publishes in transactions"),
        *(
            Permission("READ", "group", f"watersmeet-{name}-{layer}", "for Kafka's own tools, shows how far it is")
            for layer in ("bronze", "silver")
        ),
    ]
