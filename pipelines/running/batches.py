"""A batch of silver as the merge takes it, from the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelines.core.avro_schema import AvroSchema
from pipelines.core.idle import IdleDecision
from pipelines.core.merge import Batch
from pipelines.core.plan import BatchPlan, Rules, TopicPartition
from pipelines.settings import Settings


def batch_of(
    plan: BatchPlan,
    settings: Settings,
    rules: Rules,
    idle: Mapping[TopicPartition, Sequence[IdleDecision]],
    avro: Mapping[str, AvroSchema],
    lake_settings: Settings,
) -> Batch:
    """Return a plan as the merge takes it, under the rules of these settings.

    `idle`: the idle policy's decisions. `avro`: the schemas of Avro sources. `lake_settings`: those
    by which silver's columns are laid out.
    """
    return Batch(
        plan,
        {name: source.value_type for name, source in lake_settings.sources.items()},
        rules,
        idle,
        settings.publish.max_bytes if settings.publish.value is None else None,
        {name: source.read_type for name, source in settings.sources.items()},
        avro,
        topics=tuple(settings.inputs) if settings.with_topics else (),
    )
