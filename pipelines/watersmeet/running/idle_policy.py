"""The idle policy: decides that a silent source holds the clock up no longer."""

from __future__ import annotations

from watersmeet.core.idle import Idle, IdleDecision, decide
from watersmeet.core.plan import TopicPartition
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake.decisions import Decided
from watersmeet.running.planning import Planner


def decide_idle(planner: Planner, detector: IdleDetector, partitions: int) -> list[Decided]:
    """Return a decision for each silent source that holds others up, as far as Kafka confirms it.

    A source is silent if nothing has come for long enough, and nothing waits in bronze.
    """
    silent = detector.observe(planner.bronze_ends())
    heads = planner.heads()
    idle = dict[int, Idle]()
    for p in range(partitions):
        partition_heads = {tp.input: head for tp, head in heads.items() if tp.partition == p}
        inputs = {tp.input for tp in silent if tp.partition == p and not planner.waits(tp)}
        decision = decide(partition_heads, inputs)
        if decision is not None and _has_nothing_beyond(planner, detector, p, decision):
            idle[p] = decision
    tenant_times = planner.tenant_times(idle)
    decided = []
    for p, decision in idle.items():
        for tp in (TopicPartition(input_id, p) for input_id in decision.inputs):
            times = planner.raised(tp, tenant_times.get(p, ()))
            decided.append(
                (tp, IdleDecision(_last_offset(planner, tp), decision.event_time, times))
            )
    return decided


def _has_nothing_beyond(planner: Planner, detector: IdleDetector, p: int, decision: Idle) -> bool:
    after = [TopicPartition(input_id, p) for input_id in decision.inputs]
    return detector.has_nothing_beyond({tp: _last_offset(planner, tp) for tp in after})


def _last_offset(planner: Planner, tp: TopicPartition) -> int:
    """Return the last offset that the merge has consumed."""
    return planner.state.cursors[tp].next_offset - 1
