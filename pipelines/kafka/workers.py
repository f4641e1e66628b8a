"""Worker processes that read offset ranges of Kafka and decode them: decoding takes more time than all the rest of bronze.

A worker hands its rows on in Arrow's stream format. Workers are started with the first range that is read, one for each core, and
end with the process that started them, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache

import pyarrow as pa

from pipelines.kafka.ranges import split_ranges
from pipelines.kafka.reading import Range, read_range
from pipelines.settings import KafkaSettings

Decode = Callable[[pa.RecordBatch], pa.Table]


def read_decoded(kafka: KafkaSettings, ranges: Sequence[Range], decode: Decode, schema: pa.Schema) -> pa.Table:
    """The committed records of some ranges, in their order, as `decode` makes them of the columns of `core.reading.KAFKA`.

    `decode` is sent to the workers, and its result has the columns of `schema`. Raises what `read_range` raises.
    """
    try:
        parts = [_workers().submit(_read, kafka, part, decode, schema) for part in split_ranges(ranges, os.cpu_count() or 1)]
        return pa.concat_tables([schema.empty_table(), *(pa.ipc.open_stream(part.result()).read_all() for part in parts)])
    except BrokenProcessPool:
        _workers.cache_clear()  # whoever tries again gets new ones
        raise


def _read(kafka: KafkaSettings, wanted: Range, decode: Decode, schema: pa.Schema) -> bytes:
    packed = pa.BufferOutputStream()
    with pa.ipc.new_stream(packed, schema) as stream:
        for batch in read_range(kafka, wanted):
            stream.write_table(decode(batch).select(schema.names).cast(schema))
    return bytes(packed.getvalue().to_pybytes())


@cache
def _workers() -> ProcessPoolExecutor:
    # Not forked: a copy of a process that has threads, such as librdkafka's, cannot be relied on.
    return ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn"), _prepare)


def _prepare() -> None:
    """A worker ends with its parent, and with nothing else: signals may go to all processes of a run, whose batch is not done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
