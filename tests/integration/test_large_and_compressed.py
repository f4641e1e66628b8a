"""Sources compressed in every way that Kafka has, and records of 5 MB: read, merged and published
as they came."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.effort import first_then_nightly
from tests.support.rivers import EMBEDDED, FOLDER, TIMEOUT_MS, Losses, River
from tests.support.topics import consume, create_topics

pytestmark = pytest.mark.long

CODECS = ("zstd", "lz4", "snappy", "gzip")
LARGE = 5_000_000


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lake", first_then_nightly([EMBEDDED, FOLDER]))
def test_compressed_and_large_records_pass(
    kafka: str, tmp_path: Path, lake: str, on_spark: Callable[[River], River]
) -> None:
    river = on_spark(River.make(kafka, tmp_path, f"large-{lake}", lake=lake, partitions=1))
    for codec in CODECS:
        river.flow(codec=codec)
    now = river.chunks * 1000
    content = random.Random(1).randbytes(LARGE // 2).hex()  # which no codec makes small
    river.send("tracking", 0, keyed("large", now + 1, content=content), codec="zstd")
    for source in SOURCES:
        river.send(source, 0, heartbeat(now + 2 + 2 * TIMEOUT_MS))
    river.finish()
    assert river.losses() == Losses()
    assert max(len(message.value() or b"") for message in consume(kafka, river.sink, 1)) > LARGE


def test_a_sink_that_takes_no_large_message_is_told_of_and_nothing_is_lost(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "narrow", partitions=1)
    create_topics(kafka, river.sink, partitions=1, **{"max.message.bytes": "1000000"})
    river.send(
        "tracking", 0, keyed("large", 1, content=random.Random(1).randbytes(LARGE // 2).hex())
    )
    for source in SOURCES:
        river.send(source, 0, heartbeat(2 + 2 * TIMEOUT_MS))
    run = river.run("--once")
    assert run.wait() == 1
    assert f"set max.message.bytes of {river.sink} to " in run.said().splitlines()[-1]

    river.config["publish"]["topic"] = f"{river.sink}-large"
    river.write()
    river.finish()
    assert river.losses() == Losses()
