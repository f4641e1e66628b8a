"""A batch of silver as the merge takes it, from the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.idle import IdleDecision
from watersmeet.core.merge import Batch
from watersmeet.core.plan import BatchPlan, Rules, TopicPartition
from watersmeet.engine import Engine
from watersmeet.lake.generations import Generation
from watersmeet.lake.recovered import read_out
from watersmeet.lake.schemas import avro_schemas
from watersmeet.running.planning import Planner
from watersmeet.settings import Settings


def make_batch(
    engine: Engine, settings: Settings, plan: BatchPlan, planner: Planner, generation: Generation
) -> Batch:
    """Return a plan as the merge takes it, under the planner's rules."""
    avro = avro_schemas(engine.reader, settings)
    batch = batch_of(plan, settings, planner.rules, planner.idle, avro, engine.lake.settings)
    batch = replace(batch, begins_epoch=planner.begins_epoch(plan))
    if not plan.generation and not planner.has_redriven:
        return batch
    ranges = {
        tp: (done.from_offset, done.until_offset)
        for tp, done in plan.ranges.items()
        if not done.is_empty
    }
    return replace(batch, out=read_out(engine.reader, generation, ranges))


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
        has_ids=lake_settings.has_ids,
        within_ms=settings.publish.within_ms,
    )
