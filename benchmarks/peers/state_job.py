"""The merge as a stateful Spark job: transformWithState on rows, event-time timers, RocksDB.

One watermark for all partitions decides what has timed out and what came too late, so it is not
exact; nor is it ordered, and Spark's Kafka sink is at least once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from benchmarks.peers.common import (
    TIMEOUT_MS,
    arguments,
    kafka_stream,
    parsed,
    peer_session,
    run,
)

TOPIC = "merged_by_state_job"
OFFSETS_PER_BATCH = 250_000
_STATE = "spark.sql.streaming.stateStore"
_MESSAGE = '{{"key":"{}","event_time":{},"last_event_time":{},"tracking":[{}],"orders":[{}]}}'


class Merge(StatefulProcessor):
    """Collects a key's records from the first until the timeout after it; names of methods and
    arguments are Spark's."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declares the state of a key: its event time, and its records."""
        self._handle = handle
        self._event_time = handle.getValueState("event_time", "ts BIGINT")
        self._parts = handle.getListState("parts", "ts BIGINT, topic STRING, value STRING")

    def handleInputRows(self, key: Any, rows: Any, timerValues: TimerValues) -> Iterator[Row]:  # noqa: ARG002, N802, N803
        """A batch's records of a key."""
        if not key[0]:
            return  # heartbeats: they have moved the watermark
        found = self._event_time.get()
        before: int | None = found[0] if found else None
        begin = before
        new: list[tuple[int, str, str]] = []
        for row in sorted(rows, key=lambda row: row.ts):
            if begin is not None and row.ts > begin + TIMEOUT_MS:
                yield self._finished(key[0], new)
                begin, new = None, []
            begin = row.ts if begin is None else min(begin, row.ts)
            new.append((row.ts, row.topic, row.value))
        self._parts.appendList(new)
        if begin is not None and begin != before:
            if before is not None:
                self._handle.deleteTimer(before + TIMEOUT_MS)
            self._event_time.update((begin,))
            self._handle.registerTimer(begin + TIMEOUT_MS)

    def handleExpiredTimer(  # noqa: N802
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: ARG002, N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: ARG002, N803
    ) -> Iterator[Row]:
        """A key's time is over."""
        yield self._finished(key[0], [])
        self._event_time.clear()

    def _finished(self, key: str, new: list[tuple[int, str, str]]) -> Row:
        parts = sorted([*self._parts.get(), *new])
        self._parts.clear()
        values = [
            ",".join(value for _, of, value in parts if of == topic)
            for topic in ("tracking", "orders")
        ]
        return Row(key=key, value=_MESSAGE.format(key, parts[0][0], parts[-1][0], *values))


def main() -> None:
    """Merges everything available, and ends."""
    bootstrap_servers, folder, partitions, _ = arguments()
    spark = peer_session()
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    spark.conf.set(
        f"{_STATE}.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    spark.conf.set(f"{_STATE}.rocksdb.changelogCheckpointing.enabled", "true")
    records = parsed(kafka_stream(spark, bootstrap_servers, OFFSETS_PER_BATCH))
    timed = records.withColumn("at", F.timestamp_millis("ts")).withWatermark(
        "at", f"{TIMEOUT_MS} milliseconds"
    )
    # A filter would be pushed below the watermark, which the heartbeats must move.
    merged = (
        timed.withColumn("ssid", F.coalesce("ssid", F.lit("")))
        .groupBy("ssid")
        .transformWithState(
            Merge(), "key STRING, value STRING", outputMode="Append", timeMode="EventTime"
        )
    )
    run(
        merged.writeStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("topic", TOPIC),
        folder,
    )
    spark.stop()


if __name__ == "__main__":
    main()
