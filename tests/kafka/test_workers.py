"""Worker processes read and decode what this process would, tell their failures, and never outlive it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time

import psutil
import pyarrow as pa
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from pipelines import errors
from pipelines.core.reading import KAFKA
from pipelines.errors import DataLossError, KafkaUnreachableError, WatersmeetError
from pipelines.kafka import ranges
from pipelines.kafka.reading import Range, read_range
from pipelines.kafka.workers import read_decoded
from pipelines.settings import KafkaSettings
from tests.kafka.test_reading import send
from tests.support.topics import create_topics

DEADLINE_S = 60
AS_IT_IS = pa.table
"""Decodes nothing."""

STARTER = """
import sys, time
from multiprocessing import active_children
import pyarrow as pa
from pipelines.core.reading import KAFKA
from pipelines.kafka.reading import Range
from pipelines.kafka.workers import read_decoded
from pipelines.settings import KafkaSettings
read_decoded(KafkaSettings(bootstrap_servers=sys.argv[1]), [Range(sys.argv[2], 0, 0, 1)], pa.table, KAFKA)
print(active_children()[0].pid, flush=True)
time.sleep(600)
"""


def test_workers_read_what_this_process_reads_in_the_order_of_the_ranges(
    kafka: str, settings: KafkaSettings, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "SMALLEST_SPLIT", 10)
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 100)
    wanted = [Range(topic, 0, 60, 100), Range(topic, 0, 5, 5), Range(topic, 0, 0, 20)]
    found = read_decoded(settings, wanted, AS_IT_IS, KAFKA)
    assert found == pa.Table.from_batches([batch for one in wanted for batch in read_range(settings, one)], KAFKA)
    assert read_decoded(settings, [], AS_IT_IS, KAFKA) == KAFKA.empty_table()


def test_what_a_worker_fails_of_is_raised_as_it_is(kafka: str, settings: KafkaSettings, topic: str) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 3)
    admin = AdminClient({"bootstrap.servers": kafka})
    [done] = admin.delete_records([TopicPartition(topic, 0, 2)]).values()
    done.result(DEADLINE_S)
    with pytest.raises(DataLossError) as lost:
        read_decoded(settings, [Range(topic, 0, 0, 3)], AS_IT_IS, KAFKA)
    assert lost.value.missing == {0: (0, 2)}


@pytest.mark.parametrize("kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, WatersmeetError)])
def test_every_error_is_the_same_in_another_process(kind: type[WatersmeetError]) -> None:
    made = kind.__new__(kind, "a sentence")
    made.__dict__["fact"] = 7
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), str(again), again.fact) == (kind, "a sentence", 7)
    away = pickle.loads(pickle.dumps(KafkaUnreachableError("there:1", "gone")))
    assert (away.bootstrap_servers, away.retriable) == ("there:1", True)


def test_a_worker_ends_with_a_process_that_is_killed(kafka: str, topic: str) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    with subprocess.Popen([sys.executable, "-c", STARTER, kafka, topic], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        worker = psutil.Process(int(starter.stdout.readline()))
        assert worker.is_running()
        starter.kill()
    deadline = time.monotonic() + DEADLINE_S
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker outlives what started it"
        time.sleep(0.05)
