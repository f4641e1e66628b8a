"""Inputs by the names that tests give them: `tracking/web`, or `tracking` whose topic has the
source's name."""

from __future__ import annotations

from collections.abc import Mapping

from watersmeet.core.inputs import InputId
from watersmeet.core.model import NO_TENANT, Record
from watersmeet.core.plan import TopicPartition


def input_of(name: str | InputId) -> InputId:
    """Return the input with this name."""
    if isinstance(name, InputId):
        return name
    source, _, topic = name.partition("/")
    return InputId(source, topic or source)


def name_of(input_id: InputId) -> str:
    """Return the name of an input."""
    source, topic = input_id
    return source if topic == source else f"{source}/{topic}"


def tp_of(name: str | InputId, partition: int) -> TopicPartition:
    """Return a partition of the input with this name."""
    return TopicPartition(input_of(name), partition)


def record_of(
    name: str | InputId,
    offset: int,
    event_time: int,
    key: str | None = None,
    tenant: str | None = NO_TENANT,
    tenant_times: Mapping[str, int] | None = None,
) -> Record:
    """Return a record of the input with this name."""
    return Record(input_of(name), offset, event_time, key, tenant, tenant_times)
