"""Workers read and decode what this process would, and tell their failures; those that are
processes never outlive it, and are not started for few records."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from tests.kafka.test_reading import send
from tests.support.memory import MIB, arrow_peak
from tests.support.topics import create_topics, produce
from watersmeet import errors
from watersmeet.core.reading import KAFKA, ReadingRules, bronze_schema, read_records
from watersmeet.errors import (
    DataLossError,
    LeaseLostError,
    WatersmeetError,
    WorkerEndedError,
    is_retriable,
)
from watersmeet.kafka import reading, workers
from watersmeet.kafka.reading import Range, read_range
from watersmeet.kafka.workers import read_decoded
from watersmeet.settings import KafkaSettings

DEADLINE_S = 60
AS_IT_IS = pa.table
"""Decodes nothing."""

STARTER = """
import sys, time
from multiprocessing import active_children
import pyarrow as pa
from watersmeet.core.reading import KAFKA
from watersmeet.kafka.reading import Range
from watersmeet.kafka import workers
from watersmeet.kafka.workers import read_decoded
from watersmeet.settings import KafkaSettings
workers.FEW_OFFSETS = 0
kafka = KafkaSettings(bootstrap_servers=sys.argv[1])
read_decoded(kafka, [Range(sys.argv[2], 0, 0, 1)], pa.table, KAFKA)
print(active_children()[0].pid, flush=True)
time.sleep(600)
"""

SIGNALLED = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
import pyarrow as pa
from watersmeet.core.reading import KAFKA
from watersmeet.kafka.reading import Range
from watersmeet.kafka import workers
from watersmeet.kafka.workers import read_decoded
from watersmeet.settings import KafkaSettings
workers.FEW_OFFSETS = 0
kafka = KafkaSettings(bootstrap_servers=sys.argv[1])
with ThreadPoolExecutor(1) as inputs:
    reading = inputs.submit(read_decoded, kafka, [Range(sys.argv[2], 0, 0, 1)], pa.table, KAFKA)
    while not (workers := active_children()):
        time.sleep(0.001)
    for worker in workers:
        os.kill(worker.pid, int(sys.argv[3]))
    print(reading.result()[1], flush=True)
"""

AT_ONCE = """
import sys, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import pyarrow as pa
from watersmeet.core.reading import KAFKA
from watersmeet.kafka import workers
from watersmeet.kafka.reading import Range
from watersmeet.settings import KafkaSettings
class Slow(ProcessPoolExecutor):
    made = 0
    def __init__(self, *arguments):
        Slow.made += 1
        time.sleep(0.5)
        super().__init__(*arguments)
workers.ProcessPoolExecutor = Slow
workers.FEW_OFFSETS = 0
kafka = KafkaSettings(bootstrap_servers=sys.argv[1])
def read(_):
    return workers.read_decoded(kafka, [Range(sys.argv[2], 0, 0, 1)], pa.table, KAFKA)[1]
with ThreadPoolExecutor(3) as inputs:
    assert list(inputs.map(read, range(3))) == [{0: 1}] * 3
print(Slow.made, flush=True)
"""


FEW = """
import sys
from multiprocessing import active_children
import pyarrow as pa
from watersmeet.core.reading import KAFKA
from watersmeet.kafka import workers
from watersmeet.kafka.reading import Range
from watersmeet.settings import KafkaSettings
kafka = KafkaSettings(bootstrap_servers=sys.argv[1])
for few in (3, 2):
    workers.FEW_OFFSETS = few
    ranges = [Range(sys.argv[2], p, 0, until) for p, until in ((0, 2), (1, 1))]
    print(workers.read_decoded(kafka, ranges, pa.table, KAFKA)[1], len(active_children()) > 0)
"""


@pytest.fixture(params=[workers.FEW_OFFSETS, 0], ids=["threads", "processes"])
def few_offsets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has few records be read by threads, or by processes as if they were many."""
    monkeypatch.setattr(workers, "FEW_OFFSETS", request.param)


def test_a_process_is_started_only_where_more_than_few_records_are_to_be_read(
    kafka: str, topic: str
) -> None:
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(0, b"1"), (0, b"2"), (1, b"3")])
    command = [sys.executable, "-c", FEW, kafka, topic]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout == "{0: 2, 1: 1} False\n{0: 2, 1: 1} True\n"


@pytest.mark.usefixtures("few_offsets")
def test_workers_read_what_this_process_reads_in_the_order_of_the_ranges(
    kafka: str, settings: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALLEST_SPLIT", 10)
    create_topics(kafka, topic, partitions=3)
    produce(kafka, topic, [(p, b"%d" % i) for i in range(100) for p in range(2)])
    wanted = [Range(topic, 1, 60, 100), Range(topic, 2, 5, 5), Range(topic, 0, 0, 20)]
    found, ends = read_decoded(settings, wanted, AS_IT_IS, KAFKA)
    assert found == pa.Table.from_batches(
        [batch for one in wanted for batch in read_range(settings, one)], KAFKA
    )
    assert ends == {0: 20, 1: 100, 2: 5}
    assert read_decoded(settings, [], AS_IT_IS, KAFKA) == (KAFKA.empty_table(), {})


@pytest.mark.usefixtures("few_offsets")
def test_large_records_are_read_as_far_as_there_is_room_without_a_gap(
    kafka: str, settings: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALLEST_SPLIT", 10)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(p, b"%d" % i + bytes(900_000)) for i in range(60) for p in (0, 1)][:90])
    last = {0: 45, 1: 45}
    position, seen = {0: 0, 1: 0}, places(KAFKA.empty_table())
    while position != last:
        found, ends = read_decoded(
            settings,
            [Range(topic, p, position[p], last[p]) for p in last],
            AS_IT_IS,
            KAFKA,
            8 * 2**20,
        )
        assert 0 < found.nbytes < 64 * 2**20
        assert [(p, o) for p in last for o in range(position[p], ends[p])] == places(found)
        position, seen = ends, seen + places(found)
    assert sorted(seen) == [(p, o) for p in last for o in range(last[p])]


@pytest.mark.parametrize(
    ("sent", "max_bytes", "most_bytes"),
    [
        pytest.param([(b"1", 7 * MIB)], 8 * MIB, MIB, id="alone"),
        pytest.param([(b"1.5", 7 * MIB)], 8 * MIB, MIB, id="alone and not read by columns"),
        pytest.param([(b"1", 7 * MIB)], 6 * MIB, MIB, id="alone and too large"),
        pytest.param([(b"1", 5 * MIB), (b"1", 7 * MIB)], 6 * MIB, 22 * MIB, id="beside another"),
    ],
)
def test_a_large_value_is_not_copied_while_it_is_read(
    settings: KafkaSettings,
    topic: str,
    sent: list[tuple[bytes, int]],
    max_bytes: int,
    most_bytes: int,
) -> None:
    """Where one of a batch is too large, the others are copied."""
    create_topics(settings, topic, partitions=1)
    values = [b'{"id": "a", "at": %s, "text": "%s"}' % (at, b"x" * size) for at, size in sent]
    produce(settings, topic, [(0, value) for value in values], codec="zstd")
    rules = ReadingRules((("at",),), 0, ((("id",),),), max_record_bytes=max_bytes)
    with arrow_peak() as peak:
        found, _ = read_decoded(
            settings,
            [Range(topic, 0, 0, len(values))],
            partial(read_records, rules=rules),
            bronze_schema(),
        )
    assert peak() < most_bytes
    kept = [value if len(value) <= max_bytes else None for value in values]
    assert found["value"].to_pylist() == kept
    assert found["reason"].is_null().to_pylist() == [value is not None for value in kept]


def places(found: pa.Table) -> list[tuple[int, int]]:
    return list(zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True))


@pytest.mark.usefixtures("few_offsets")
def test_what_a_worker_fails_of_is_raised_as_it_is(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 3)
    admin = AdminClient({"bootstrap.servers": kafka})
    [done] = admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    done.result(DEADLINE_S)
    with pytest.raises(DataLossError) as lost:
        read_decoded(settings, [Range(topic, 0, 0, 3)], AS_IT_IS, KAFKA)
    assert lost.value.missing == {0: (0, 2)}


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, WatersmeetError)],
)
def test_every_error_is_the_same_in_another_process(kind: type[WatersmeetError]) -> None:
    made = kind.__new__(kind, "a sentence")
    made.__dict__["fact"] = 7
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again), again.fact) == (kind, "a sentence", 7)
    lost = pickle.loads(pickle.dumps(LeaseLostError("./lake", "forget")))
    assert (lost.change, lost.problem.fix) == ("forget", "start it again")


def test_inputs_that_are_read_at_once_share_their_workers(kafka: str, topic: str) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    command = [sys.executable, "-c", AT_ONCE, kafka, topic]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    assert done.stdout == "1\n"


def killed(batch: pa.RecordBatch) -> pa.Table:
    """Decodes nothing: the worker is killed meanwhile, as by the kernel where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    return AS_IT_IS(batch)


def test_a_worker_that_is_killed_is_trouble_that_passes_with_new_workers(
    kafka: str, settings: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "FEW_OFFSETS", 0)
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    wanted = [Range(topic, 0, 0, 1)]
    with pytest.raises(WorkerEndedError, match=f"was killed while it read {topic}") as ended:
        read_decoded(settings, wanted, killed, KAFKA)
    assert is_retriable(ended.value)
    assert read_decoded(settings, wanted, AS_IT_IS, KAFKA)[1] == {0: 1}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_outlives_a_signal_from_its_first_moment_on(
    kafka: str, topic: str, number: int
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    command = [sys.executable, "-c", SIGNALLED, kafka, topic, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout == "{0: 1}\n", done.stderr


def test_a_worker_ends_with_a_process_that_is_killed(kafka: str, topic: str) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, kafka, topic], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        worker = psutil.Process(int(starter.stdout.readline()))
        assert worker.is_running()
        assert not [m.path for m in worker.memory_maps() if "pandas" in m.path]
        starter.kill()
    deadline = time.monotonic() + DEADLINE_S
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlives what started it"
        time.sleep(0.05)
