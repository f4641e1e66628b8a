"""Where a message is in its topic, as the topic says it while Kafka answers."""

from __future__ import annotations

from collections.abc import Mapping

from watersmeet.core.columns import row_values
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import Settings

_MARKERS = 1000
PATIENCE_S = 3.0
"""Seconds after which a broker that does not answer counts as away: the tables know nearly as much.
"""


class Topics:
    """Reader of the topics that gold publishes to, while Kafka answers."""

    def __init__(self, settings: Settings) -> None:
        self._kafka = settings.kafka
        self._cluster = Cluster(settings.kafka, PATIENCE_S)
        self._is_away = False

    def offset_of(
        self, topic: str, partition: int, headers: Mapping[str, str], guess: int
    ) -> tuple[int | None, bool]:
        """Return the offset of the message with these headers, and True where it was sent.

        The offset is None where the topic does not have the message, and the guess where Kafka does
        not answer. A message that is missing may have been removed by retention. Otherwise it was
        never sent: it sorts before what a lost lake or a jump had left.

        The guess is never too small: between a message and the last of its transaction there may be
        markers of other transactions.
        """
        if self._is_away:
            return guess, True
        expected = [{"key": name, "value": value.encode()} for name, value in headers.items()]
        try:
            first, end = self._cluster.bounds_of(topic, [partition])[partition]
            for start in (max(first, guess - _MARKERS), first):
                until = Range(topic, partition, start, min(guess + 1, end))
                for batch in read_range(self._kafka, until, timeout_s=PATIENCE_S):
                    for offset, own in row_values(batch, "offset", "headers"):
                        if all(header in (own or []) for header in expected):
                            return int(offset), True
        except WatersmeetError:
            self._is_away = True
            return guess, True
        return None, first > 0
