"""A broker that is down, slow or killed: the run waits with a visible reason, or stops with one
sentence; nothing is halved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from tests.support.cases import expected_messages
from tests.support.configurations import settings_for
from tests.support.metrics import Exposed, scrape
from tests.support.rivers import DEADLINE_S, FOLDER, Losses, River, until
from tests.support.topics import add_partitions, create_topics, delete_topic, published
from watersmeet.dev import broker
from watersmeet.dev.processes import free_port
from watersmeet.errors import KafkaUnreachableError, TopicChangedError, WatersmeetError
from watersmeet.kafka import topic_monitor
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.permissions import transactional_id
from watersmeet.kafka.topic_monitor import TopicMonitor
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.runner import Runner

pytestmark = pytest.mark.long


class Told(Reporter):
    """Keeps everything that was told."""

    def __init__(self) -> None:
        super().__init__()
        self.news: list[str] = []

    def notify(self, layer: str, news: str, **_: int | str | None) -> None:
        self.news.append(f"{layer}: {news}")


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a broker that tests may break, as long as it runs in the end."""
    folder = tmp_path_factory.mktemp("broker")
    broker.start(folder)
    yield folder
    broker.stop(folder)


def bootstrap(folder: Path) -> str:
    servers = broker.status(folder).bootstrap_servers
    assert servers is not None
    return servers


def process_of(folder: Path) -> psutil.Process:
    pid = broker.status(folder).pid
    assert pid is not None
    return psutil.Process(pid)


@pytest.mark.promise("K3")
@pytest.mark.fault("broker")
def test_trouble_is_borne_until_it_ends_or_the_limit_is_reached() -> None:
    told, tries = Told(), iter([True, True, False])

    def work() -> None:
        if next(tries):
            raise KafkaUnreachableError("no broker answers")

    Runner(told, threading.Event(), limit_s=60).retry(work)
    assert [news.partition(";")[0] for news in told.news] == [
        "kafka: no broker answers",
        "kafka: answers again",
    ]

    def never() -> None:
        raise KafkaUnreachableError("no broker answers")

    with pytest.raises(WatersmeetError, match=r"no broker answers \(tried again for 0 s\)"):
        Runner(told, threading.Event(), limit_s=0).retry(never)


def test_what_is_no_trouble_with_kafka_is_not_tried_again() -> None:
    tries = []

    def work() -> None:
        tries.append(1)
        raise ValueError("our own defect")

    with pytest.raises(ValueError, match="our own defect"):
        Runner(Told(), threading.Event(), limit_s=60).retry(work)
    assert tries == [1]


def test_a_stop_ends_the_waiting() -> None:
    stopping = threading.Event()
    stopping.set()

    def never() -> None:
        raise KafkaUnreachableError("no broker answers")

    Runner(Told(), stopping, limit_s=3600).retry(never)


@pytest.mark.promise("K3")
@pytest.mark.fault("broker")
def test_a_broker_that_is_down_at_the_start_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KafkaUnreachableError, match=r"no Kafka broker answers at 127\.0\.0\.1:1 "):
        Run(settings_for(tmp_path), LAYERS, Told())


def outlive(
    river: River,
    folder: Path,
    is_said: Callable[..., bool],
    is_counted: Callable[[], bool] = lambda: True,
) -> None:
    """The broker is killed while a run goes on, and started again; the run has said and counted it,
    and published all that came before and after."""
    until(lambda: is_said("published to"), "the first messages")
    port = broker.status(folder).port
    process_of(folder).kill()
    until(lambda: is_said("trying again", "waiting for"), "a visible reason")
    until(is_counted, "an error and a further try, counted")
    broker.start(folder, port)
    river.flow()
    river.flow()
    expected = expected_messages(river.cases)
    until(
        lambda: len(published(river.kafka, river.sink, 1)) == len(expected) or is_said("Traceback"),
        "the rest",
    )


@pytest.mark.promise("K1")
@pytest.mark.fault("broker", oracle=True)
@pytest.mark.timeout(900)
def test_a_run_outlives_a_broker_that_is_killed_and_started_again(
    own_broker: Path, tmp_path: Path
) -> None:
    port = free_port()
    river = River.make(
        bootstrap(own_broker), tmp_path / "river", "outage", partitions=1, metrics={"port": port}
    )
    river.flow()
    river.flow()
    run = river.run()

    def is_said(*news: str) -> bool:
        assert run.process.poll() is None, run.said()
        return any(one in run.log.read_text() for one in news)

    def is_counted() -> bool:
        seen, kind = scrape(port) or Exposed(""), {"kind": "KafkaUnreachableError"}
        is_owner = seen.value("watersmeet_owner") == len(LAYERS)
        return is_owner and all(
            (seen.value(f"watersmeet_{what}_total", **kind) or 0) > 0
            for what in ("errors", "retries")
        )

    try:
        outlive(river, own_broker, is_said, is_counted)
        assert run.stop() == 0, run.said()
    finally:
        run.kill()
    assert "Traceback" not in run.log.read_text()
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.promise("K1")
@pytest.mark.fault("broker", oracle=True)
@pytest.mark.timeout(900)
def test_with_spark_a_run_outlives_a_killed_broker_too(
    own_broker: Path, tmp_path: Path, root_session: SparkSession
) -> None:
    river = River.make(
        bootstrap(own_broker), tmp_path / "river", "outage-spark", lake=FOLDER, partitions=1
    )
    river.flow()
    river.flow()
    told, stopping = Told(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(Run(river.settings, LAYERS, told, stopping).until_stopped)

        def is_said(*news: str) -> bool:
            assert not run.done(), (run.exception(), told.news)
            return any(one in said for one in news for said in told.news)

        try:
            outlive(river, own_broker, is_said)
        finally:
            stopping.set()
        run.result(DEADLINE_S)
    assert river.losses() == Losses()


@pytest.mark.promise("K2")
@pytest.mark.fault("broker", oracle=True)
@pytest.mark.timeout(900)
def test_a_broker_that_stands_still_for_a_while_changes_nothing(
    own_broker: Path, tmp_path: Path
) -> None:
    river = River.make(bootstrap(own_broker), tmp_path / "river", "slow", partitions=1)
    river.flow()
    river.flow()
    run = river.run("--once")
    until(
        lambda: "lake: ready" in run.log.read_text() or run.process.poll() is not None, "the tables"
    )
    paused = process_of(own_broker)
    timer = threading.Timer(4, paused.resume)
    paused.suspend()
    timer.start()
    try:
        assert run.wait() == 0, run.said()
    finally:
        timer.join()
    assert river.losses() == Losses()


@pytest.mark.promise("K7")
@pytest.mark.fault("kill")
@pytest.mark.timeout(900)
def test_a_transaction_that_somebody_abandoned_does_not_hold_the_sequence_up(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "abandoned", partitions=1)
    create_topics(kafka, river.sink, partitions=1)
    left = Producer(
        {"bootstrap.servers": kafka, "transactional.id": transactional_id("abandoned", river.sink)}
    )
    left.init_transactions(30)
    left.begin_transaction()
    left.produce(river.sink, b"half a batch", partition=0)
    left.flush(30)
    river.flow()
    river.flow()
    river.finish()
    assert expected_messages(river.cases)
    assert river.losses() == Losses()


@pytest.fixture
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_monitor, "LOOK_EVERY_S", 0.0)


def watched(kafka: str, folder: Path, *topics: str) -> TopicMonitor:
    create_topics(kafka, *topics, partitions=1)
    first, second = topics
    settings = settings_for(
        folder, bootstrap=kafka, sources__tracking__topic=first, sources__orders__topic=second
    )
    told = Told()
    return TopicMonitor(settings, 1, lambda _, news: told.notify("kafka", news), limit_s=60)


@pytest.mark.promise("C4")
@pytest.mark.fault("topics")
def test_partitions_added_under_way_stop_the_run(
    always_looks: None, kafka: str, tmp_path: Path
) -> None:
    watch = watched(kafka, tmp_path, "growing", "steady")
    watch.poll()
    add_partitions(kafka, "growing", 2)
    with pytest.raises(TopicChangedError, match="growing has 2 partitions now, and 1 are read"):
        watch.poll()


def test_a_topic_made_again_under_way_stops_the_run(
    always_looks: None, kafka: str, tmp_path: Path
) -> None:
    watch = watched(kafka, tmp_path, "replaced", "kept")
    delete_topic(kafka, "replaced")
    create_topics(kafka, "replaced", partitions=1)
    with pytest.raises(
        TopicChangedError, match="replaced was deleted and made again while it was being read"
    ):
        watch.poll()


def test_a_topic_that_an_answer_lacks_is_deleted_once_the_next_answer_lacks_it_too(
    always_looks: None, kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(kafka, tmp_path, "going", "staying")
    for _ in range(2):
        with monkeypatch.context() as patch:
            staying = watch._cluster.existing(["staying"])
            patch.setattr(Cluster, "existing", lambda *_: staying)  # noqa: B023 - at once
            watch.poll()
        watch.poll()
    delete_topic(kafka, "going")
    watch.poll()
    with pytest.raises(TopicChangedError, match="going was deleted while it was being read"):
        watch.poll()
