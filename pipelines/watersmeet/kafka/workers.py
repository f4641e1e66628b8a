"""Workers that read and decode ranges of Kafka: decoding takes more time than the rest of bronze.

Few records are read by threads of this process, many by worker processes, one a core, which are
started with the first of them, end with the process that started them, however that ends, and hand
their rows on in Arrow's stream format.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from typing import Final

import pyarrow as pa

from watersmeet.errors import WorkerEndedError
from watersmeet.imports import hide_pandas, leave_imports_alone
from watersmeet.kafka.reading import Range, read_range, split_ranges
from watersmeet.settings import KafkaSettings

SAFE_PATH = ("PYTHONSAFEPATH", "1")
"""A variable, and value, by which Python imports nothing from the current folder (3.11)."""

FEW_OFFSETS: Final = 5_000
"""Most offsets that threads read, in tens of ms; a process takes half a second to start."""

Decode = Callable[[pa.RecordBatch], pa.Table]


def read_decoded(
    kafka: KafkaSettings,
    ranges: Sequence[Range],
    decode: Decode,
    schema: pa.Schema,
    max_bytes: int | None = None,
) -> tuple[pa.Table, dict[int, int]]:
    """Return the decoded committed records of ranges of one topic, one a partition, in their order,
    and by partition the offset where reading ended.

    `decode` makes the records of `core.reading.KAFKA` columns; where there are many, it is sent to
    worker processes, and its result has the columns of `schema`. Reading ends early where the
    records have more than about `max_bytes`. Raises what `read_range` raises, and WorkerEndedError.
    """
    parts = split_ranges(ranges, os.cpu_count() or 1)
    room = None if max_bytes is None else max_bytes // max(1, len(parts))
    tables = [schema.empty_table()]
    ends = {whole.partition: whole.from_offset for whole in ranges}
    futures: list[Future[tuple[pa.Table | pa.Buffer, int]]] = []
    is_few = sum(part.size for part in parts) <= FEW_OFFSETS
    workers: Executor = _THREADS if is_few else _processes()
    read = _read if is_few else _read_packed
    try:
        with _blocked_signals():
            futures += [workers.submit(read, kafka, part, decode, schema, room) for part in parts]
        for part, future in zip(parts, futures, strict=True):
            rows, end = future.result()
            # Else there is a gap before it, and it is read another time.
            if ends[part.partition] == part.from_offset:
                is_packed = isinstance(rows, pa.Buffer)
                tables.append(pa.ipc.open_stream(rows).read_all() if is_packed else rows)
                ends[part.partition] = end
    except BrokenProcessPool as error:
        _discard(workers)  # whoever tries again gets new ones
        raise WorkerEndedError(f"read {ranges[0].topic}") from error
    finally:
        # After a failure, whoever tries again, or stops, waits for none of the others.
        for future in futures:
            future.cancel()
    return pa.concat_tables(tables), ends


def _read(
    kafka: KafkaSettings, offset_range: Range, decode: Decode, schema: pa.Schema, room: int | None
) -> tuple[pa.Table, int]:
    tables, ends = zip(*_decoded(kafka, offset_range, decode, schema, room), strict=True)
    return pa.concat_tables(tables), ends[-1]


def _read_packed(
    kafka: KafkaSettings, offset_range: Range, decode: Decode, schema: pa.Schema, room: int | None
) -> tuple[pa.Buffer, int]:
    packed = pa.BufferOutputStream()
    ends = []
    with pa.ipc.new_stream(packed, schema) as stream:
        for rows, end in _decoded(kafka, offset_range, decode, schema, room):
            stream.write_table(rows)
            ends.append(end)
            del rows  # not in memory while the next ones come
    return packed.getvalue(), ends[-1]


def _decoded(
    kafka: KafkaSettings, offset_range: Range, decode: Decode, schema: pa.Schema, room: int | None
) -> Iterator[tuple[pa.Table, int]]:
    # Each batch with where reading ends if it ends there; the last ones are none, or fill the room.
    size = 0
    for batch in read_range(kafka, offset_range):
        rows = decode(batch).select(schema.names).cast(schema)
        end = batch["offset"][-1].as_py() + 1
        size += rows.nbytes
        yield rows, end
        if room is not None and size >= room:
            return
        del batch, rows  # not in memory while the next ones come
    yield schema.empty_table(), offset_range.until_offset


_THREADS: Final = ThreadPoolExecutor(os.cpu_count() or 1)
"""They start with the first few records that are read."""

_lock: Final = threading.Lock()
"""Held to start or discard processes: all inputs share them, and are read side by side."""


def _processes() -> ProcessPoolExecutor:
    with _lock:
        return _pool()


def _discard(workers: Executor) -> None:
    with _lock:
        if _pool() is workers:
            _pool.cache_clear()


@cache
def _pool() -> ProcessPoolExecutor:
    os.environ.setdefault(*SAFE_PATH)
    # Not forked: a copy of a process that has threads, such as librdkafka's, cannot be relied on.
    return ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("spawn"), _prepare)


STOPPING: Final = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a run to stop, perhaps all of its processes, amid a worker's batch."""


@contextmanager
def _blocked_signals() -> Iterator[None]:
    # And for good in the processes that are started meanwhile, so that a worker outlives them
    # before it has come to `_prepare`, too. (multiprocessing's tracker, whose start unblocks them,
    # has been started with the pool.)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepare() -> None:
    pa.set_memory_pool(pa.system_memory_pool())  # see `engine.embedded`
    hide_pandas()
    leave_imports_alone()
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
