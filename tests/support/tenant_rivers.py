"""A river whose records are of tenants, on a broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tests.support.cases import SOURCES
from tests.support.correction_topic import assert_in_sequence, corrections_seen
from tests.support.corrections import (
    CorrectionModels,
    consumed,
    corrections_in,
    corrections_of,
)
from tests.support.rivers import River
from tests.support.tenants import (
    LENGTHS,
    Window,
    late_of,
    merge_of,
    silver_of,
    tenant_cases,
)
from tests.support.topics import Access, consume

FIRST: Window = (100, 250, 300)


class TenantRiver:
    """A river of cases with tenants, and what the merge model makes of them.

    `lengths`: of which each partition's case has so many records.
    """

    def __init__(
        self,
        kafka: Access,
        folder: Path,
        name: str,
        *,
        partitions: int = 6,
        lengths: Sequence[int] = LENGTHS,
        **overrides: Any,
    ) -> None:
        self.cases = tenant_cases(partitions, lengths)
        self.river = River.make(
            kafka, folder, name, partitions=partitions, merge=merge_of(FIRST), **overrides
        )
        within_ms = self.river.settings.publish.within_ms
        topics = {source: self.river.topic(source) for source in SOURCES}
        self.models = CorrectionModels(self.cases, FIRST, within_ms, topics=topics)
        self._sent = dict.fromkeys(self.cases, 0)

    def arrive(self, share: float) -> None:
        for p, case in self.cases.items():
            until, seen = round(share * len(case.arrivals)), case.arrivals[: self._sent[p]]
            for source in case.arrivals[self._sent[p] : until]:
                self.river.send(source, p, case.values[source][seen.count(source)])
                seen = [*seen, source]
            self._sent[p] = until
        self.models.arrive(share)

    def check(self) -> None:
        """Silver, late and the sink are the model's, and verify finds nothing."""
        assert self.differing() == []
        assert self.river.broken_promises() == []

    def differing(self) -> list[str]:
        """Which of late, silver, the sink and what there is of corrections are not the model's."""
        pairs: dict[str, tuple[Any, Any]] = {
            "late": (late_of(self.river.reader), self.models.late()),
            "silver": (silver_of(self.river.reader), self.models.silver()),
            "the sink": (self.sequence(), self.models.order()),
        }
        publish = self.river.settings.publish
        if publish.corrections is not None:
            kafka, partitions = self.river.kafka, len(self.cases)
            seen = consume(kafka, publish.sequence_topics[1], partitions)
            assert_in_sequence(corrections_seen(seen))
            pairs["corrections"] = corrections_of(self.river.reader), self.models.rows()
            pairs["their topic"] = (
                corrections_in(kafka, publish.sequence_topics[1], partitions),
                self.models.messages(),
            )
            pairs["what a consumer of both topics has"] = (
                consumed(kafka, publish.sequence_topics, partitions),
                self.models.consumed(),
            )
        return [name for name, (here, there) in pairs.items() if here != there]

    def sequence(self) -> dict[int, list[Any]]:
        """By partition what the sink says: closed at, tenant, due, key, in order, with gapless
        numbers."""
        found: dict[int, list[Any]] = {p: [] for p in self.cases}
        for message in consume(self.river.kafka, self.river.sink, len(self.cases)):
            headers = {name: value.decode() for name, value in message.headers()}
            mine, value = found[message.partition()], orjson.loads(message.value())
            assert int(headers["watersmeet.seq"]) == len(mine)
            assert (value["key"], value["tenant"]) == (
                message.key().decode(),
                headers["watersmeet.tenant"],
            )
            mine.append(
                (
                    int(headers["watersmeet.closed_at"]),
                    value["tenant"],
                    int(headers["watersmeet.due"]),
                    value["key"],
                )
            )
        return found
