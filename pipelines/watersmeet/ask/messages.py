"""Where a message is in its topic, as the topic says it while Kafka answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from watersmeet.core.columns import row_values
from watersmeet.core.sequence import SEQ
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import Settings

_MARKERS = 1000
PATIENCE_S = 3.0
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""


class Numbers(NamedTuple):
    """The offset of a message, and its number in its sequence; None where they are not known."""

    offset: int | None
    seq: int | None


class Topics:
    """Reader of the topics that gold publishes to, while Kafka answers."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._cluster = Cluster(settings.kafka, PATIENCE_S)
        self._is_away = False

    def numbers_of(
        self, topic: str, partition: int, headers: Mapping[str, str], guess: Numbers
    ) -> tuple[Numbers, bool]:
        """Return the numbers of the message with these headers, and True where it was sent.

        The offset is None where the topic does not have the message. It is the guess, as its other
        number, where there is no guess of it, or where Kafka does not answer. A message that is
        missing may have been removed by retention. Otherwise it was never sent: it sorts before
        what a lost lake or a jump had left.

        The guess of an offset is never too small: between a message and the last of its transaction
        there may be markers of other transactions, and messages of rows that are deleted.
        """
        last = guess.offset
        if last is None:
            return guess, True
        if self._is_away:
            return guess, True
        expected = [{"key": name, "value": value.encode()} for name, value in headers.items()]
        try:
            first, end = self._cluster.bounds_of(topic, [partition])[partition]
            for start in (max(first, last - _MARKERS), first):
                until = Range(topic, partition, start, min(last + 1, end))
                for batch in read_range(self._kafka, until, timeout_s=PATIENCE_S):
                    for offset, own in row_values(batch, "offset", "headers"):
                        if all(header in (own or []) for header in expected):
                            return Numbers(int(offset), _seq(own)), True
        except WatersmeetError:
            self._is_away = True
            return guess, True
        return guess._replace(offset=None), first > 0


def _seq(headers: list[dict[str, Any]]) -> int | None:
    numbers = [header["value"] for header in headers if header["key"] == SEQ]
    return int(numbers[-1]) if numbers and (numbers[-1] or b"").isdigit() else None
