"""What messages tell for a lake that is lost."""

from __future__ import annotations

from collections.abc import Mapping

from watersmeet.core.idle import IdleDecision
from watersmeet.core.recovery import CloseTimeRange, Decisions, HeaderDecisions


def idle_header(
    decisions: Decisions, min_offsets: Mapping[str, int], closings: CloseTimeRange | None = None
) -> dict[str, tuple[IdleDecision, ...]]:
    """By source, its decisions from the offset before its min_offset on, in order; only sources
    that have some."""
    header = {}
    for source, offset in min_offsets.items():
        own = HeaderDecisions(closings)
        for decision in sorted(decisions.get(source, ())):
            if decision.after_offset >= offset - 1:
                own.add(decision)
        if merged := own.merged():
            header[source] = merged
    return header
