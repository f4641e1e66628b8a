"""The laws of the embedded broker, against the real one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.topics import CheckedProducer, committed
from watersmeet.dev import broker
from watersmeet.dev.broker import INHERITED, BrokerStatus
from watersmeet.errors import ArtifactsError, BrokerError, WatersmeetError
from watersmeet.jvm.artifacts import REPOSITORY
from watersmeet.kafka.groups import Group
from watersmeet.settings import KafkaSettings

pytestmark = [pytest.mark.long, pytest.mark.promise("A10")]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for a broker of the test's own, which is stopped whatever happens; any name of a
    directory will do."""
    # Starts faster.
    monkeypatch.setenv("KAFKA_HEAP_OPTS", "-Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1")
    place = tmp_path / "my broker, größer"
    try:
        yield place
    finally:
        broker.stop(place, timeout_s=10)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerStatus]:
    """One running broker for the tests that do not end it; started by two at once, as must be
    harmless."""
    place = tmp_path_factory.mktemp("broker")
    try:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(broker.start, [place, place])
        assert one == other
        yield one
    finally:
        broker.stop(place, timeout_s=10)


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Somebody else who holds a port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        held.listen()
        yield held.getsockname()[1]


def eventually(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def servers(status: BrokerStatus) -> str:
    assert status.bootstrap_servers is not None
    return status.bootstrap_servers


def pid_of(status: BrokerStatus) -> int:
    assert status.pid is not None
    return status.pid


def make_topic(status: BrokerStatus, topic: str, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers(status)})
    admin.create_topics([NewTopic(topic, 1, 1, config=config)])[topic].result(20)


def produce(status: BrokerStatus, topic: str, *values: bytes) -> None:
    producer = CheckedProducer(servers(status), **{"message.max.bytes": 16_000_000})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(20) == 0


def read_all(status: BrokerStatus, topic: str) -> list[bytes]:
    """Every committed value of the topic's one partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers(status),
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
        }
    )
    values: list[bytes] = []
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while True:
            message = consumer.poll(20)
            assert message is not None, "neither a message nor the end within 20 s"
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                return values
            values.append(message.value() or b"")
    finally:
        consumer.close()


def java_processes(directory: Path) -> list[int]:
    """Every live process that works in the broker's directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def assert_one_clear_sentence(error: WatersmeetError) -> None:
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)
    assert len(str(error)) < 400


def test_a_started_broker_answers(shared: BrokerStatus) -> None:
    assert shared.running
    assert shared.bootstrap_servers == f"127.0.0.1:{shared.port}"
    assert AdminClient({"bootstrap.servers": servers(shared)}).list_topics(timeout=10).brokers
    assert broker.status(shared.directory) == shared


def test_starting_again_leaves_the_running_broker_alone(shared: BrokerStatus) -> None:
    assert broker.start(shared.directory) == shared
    assert broker.start(shared.directory, shared.port) == shared


def test_a_running_broker_is_not_moved_to_another_port(shared: BrokerStatus) -> None:
    assert shared.port is not None
    with pytest.raises(BrokerError, match=f"already runs on port {shared.port}") as raised:
        broker.start(shared.directory, shared.port + 1)
    assert_one_clear_sentence(raised.value)
    assert broker.status(shared.directory) == shared


def test_listens_on_loopback_only(shared: BrokerStatus) -> None:
    listeners = [
        connection.laddr
        for connection in psutil.Process(shared.pid).net_connections("all")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listeners) == 2
    assert {address.ip for address in listeners} == {"127.0.0.1"}
    assert shared.port in {address.port for address in listeners}


@pytest.mark.nightly
def test_starts_at_the_same_time_make_one_broker(shared: BrokerStatus) -> None:
    assert java_processes(shared.directory) == [shared.pid]


def test_is_detached_from_its_starter(shared: BrokerStatus) -> None:
    assert os.getsid(pid_of(shared)) == shared.pid != os.getsid(0)
    files = {int(link.name): link.readlink() for link in Path(f"/proc/{shared.pid}/fd").iterdir()}
    log = shared.directory / "broker.log"
    assert [files[0], files[1], files[2]] == [Path("/dev/null"), log, log]


@pytest.mark.promise("C36")
def test_it_has_of_the_environment_what_java_needs_alone(shared: BrokerStatus) -> None:
    assert shared.pid is not None
    assert psutil.Process(shared.pid).environ().keys() <= {*INHERITED, "LC_ALL"}
    assert "PYTEST_CURRENT_TEST" not in INHERITED


def test_the_log_has_dates_and_is_short(shared: BrokerStatus) -> None:
    lines = (shared.directory / "broker.log").read_text().splitlines()
    assert any("Kafka Server started" in line and line.startswith("20") for line in lines)
    assert len(lines) < 100


def test_transactions_work(shared: BrokerStatus) -> None:
    make_topic(shared, "transactions")
    producer = Producer({"bootstrap.servers": servers(shared), "transactional.id": "t"})
    producer.init_transactions(20)
    for value, commit in ((b"first", True), (b"never", False), (b"second", True)):
        producer.begin_transaction()
        producer.produce("transactions", value)
        assert producer.flush(20) == 0
        (producer.commit_transaction if commit else producer.abort_transaction)(20)
    assert read_all(shared, "transactions") == [b"first", b"second"]


def test_consumer_groups_keep_their_offsets(shared: BrokerStatus) -> None:
    make_topic(shared, "groups")
    assert committed(servers(shared), "g", "groups", 1) == {0: -1001}
    Group(KafkaSettings(bootstrap_servers=servers(shared)), "g").commit({("groups", 0): 7})
    assert committed(servers(shared), "g", "groups", 1) == {0: 7}


def test_values_above_8_mib_pass(shared: BrokerStatus) -> None:
    value = os.urandom(9 * 1024 * 1024)
    make_topic(shared, "large")
    produce(shared, "large", value)
    assert read_all(shared, "large") == [value]


def test_no_topic_is_made_by_accident(shared: BrokerStatus) -> None:
    admin = AdminClient({"bootstrap.servers": servers(shared), "allow.auto.create.topics": True})
    admin.list_topics("accident", timeout=10)
    assert "accident" not in admin.list_topics(timeout=10).topics


@pytest.mark.nightly
def test_data_survives_stop_and_start(directory: Path) -> None:
    first = broker.start(directory)
    make_topic(first, "kept")
    produce(first, "kept", b"a", b"b")
    stopped = broker.stop(directory)
    assert stopped == replace(first, running=False, pid=None)
    assert stopped.bootstrap_servers is None

    again = broker.start(directory)
    assert again.port == first.port, "without a port asked for, it comes back where it was"
    assert read_all(again, "kept") == [b"a", b"b"]


def test_stop_leaves_no_process_behind(directory: Path) -> None:
    started = broker.start(directory)
    assert java_processes(directory) == [started.pid]
    broker.stop(directory)
    assert java_processes(directory) == []
    assert not psutil.pid_exists(pid_of(started)), "not even a zombie"
    assert not broker.status(directory).running
    assert "signal SIGTERM" in (directory / "broker.log").read_text(), "it was asked, not killed"


def test_stopping_what_does_not_run_is_fine(tmp_path: Path) -> None:
    place = tmp_path / "never"
    nothing = BrokerStatus(running=False, port=None, pid=None, directory=place)
    assert broker.stop(place) == broker.status(place) == nothing
    assert not place.exists()


@pytest.mark.nightly
@pytest.mark.fault("broker")
def test_a_crashed_broker_is_not_running_and_comes_back_on_other_ports(directory: Path) -> None:
    first = broker.start(directory)
    make_topic(first, "kept")
    produce(first, "kept", b"a")
    os.kill(pid_of(first), signal.SIGKILL)
    eventually(lambda: not broker.status(directory).running)
    assert broker.status(directory) == replace(first, running=False, pid=None)

    controller_port = json.loads((directory / "broker.json").read_text())["controller_port"]
    with listening() as free:
        pass
    with listening(controller_port):
        moved = broker.start(directory, free)
        assert moved.port == free != first.port
        produce(moved, "kept", b"b")
        assert read_all(moved, "kept") == [b"a", b"b"]


@pytest.mark.nightly
def test_survives_the_death_of_the_process_that_started_it(directory: Path) -> None:
    code = (
        "import pathlib, sys, time; from watersmeet.dev import broker; "
        "broker.start(pathlib.Path(sys.argv[1])); print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, text=True
    ) as starter:
        try:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "up\n"
        finally:
            starter.kill()
    assert starter.returncode == -signal.SIGKILL
    survivor = broker.status(directory)
    assert survivor.running
    make_topic(survivor, "after")
    produce(survivor, "after", b"still here")
    assert read_all(survivor, "after") == [b"still here"]
    assert not broker.stop(directory).running
    assert java_processes(directory) == []


@pytest.mark.nightly
def test_a_starter_that_dies_early_leaves_a_broker_that_can_be_found_and_one_that_hangs_is_killed(
    directory: Path,
) -> None:
    code = (
        "import pathlib, sys; from watersmeet.dev import broker; "
        "broker.start(pathlib.Path(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(directory)]) as starter:
        try:
            eventually(lambda: broker.status(directory).running)
        finally:
            starter.kill()
    orphan = broker.status(directory)
    assert orphan.running
    assert broker.start(directory) == orphan, "the next start waits for the same broker"

    os.kill(pid_of(orphan), signal.SIGSTOP)
    assert not broker.stop(directory, timeout_s=0.3).running
    assert java_processes(directory) == []


@pytest.mark.nightly
def test_a_recycled_pid_is_never_signalled(directory: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], cwd="/"
    ) as bystander:
        try:
            directory.mkdir()
            for age in (-3600.0, -10.0, 3600.0):
                record = {
                    "port": 29_092,
                    "controller_port": 29_093,
                    "pid": bystander.pid,
                    "create_time": psutil.Process(bystander.pid).create_time() + age,
                }
                (directory / "broker.json").write_text(json.dumps(record))
                assert not broker.status(directory).running
                assert not broker.stop(directory).running
                assert bystander.poll() is None
        finally:
            bystander.kill()


@pytest.mark.nightly
def test_a_port_in_use_is_a_clear_error(directory: Path) -> None:
    with (
        listening() as taken,
        pytest.raises(
            BrokerError, match=rf"cannot listen on 127\.0\.0\.1:{taken} \(address already in use\)"
        ) as raised,
    ):
        broker.start(directory, taken)
    assert f"127.0.0.1:{taken}" in str(raised.value)
    assert_one_clear_sentence(raised.value)
    assert java_processes(directory) == []
    assert broker.status(directory).port is None, "a port that never worked is not remembered"


@pytest.mark.nightly
def test_a_port_taken_while_the_broker_starts_is_a_clear_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "port_problem", lambda _: None)
    with listening() as taken, pytest.raises(BrokerError, match="Address already in use") as raised:
        broker.start(directory, taken)
    assert f"127.0.0.1:{taken}" in str(raised.value)
    assert_one_clear_sentence(raised.value)
    assert java_processes(directory) == []
    assert not broker.status(directory).running


@pytest.mark.nightly
def test_a_broker_that_is_not_up_in_time_is_not_left_behind(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "_answering_cluster", lambda *_: None)
    with pytest.raises(BrokerError, match="in time") as raised:
        broker.start(directory, timeout_s=2)
    assert_one_clear_sentence(raised.value)
    assert java_processes(directory) == []
    assert broker.status(directory).port is None


@pytest.mark.nightly
def test_the_heap_is_the_users_to_choose(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_HEAP_OPTS", "-Xmxplenty")
    with pytest.raises(BrokerError, match=r"Invalid maximum heap size: -Xmxplenty") as raised:
        broker.start(directory)
    assert_one_clear_sentence(raised.value)


def test_missing_java_is_a_clear_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BrokerError, match=r"JAVA_HOME is .*install one"):
        broker.start(directory)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match=r"no java is on the PATH.*install one") as raised:
        broker.start(directory)
    assert_one_clear_sentence(raised.value)


def test_missing_jars_are_a_clear_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(REPOSITORY, "http://127.0.0.1:9/maven2")
    with pytest.raises(ArtifactsError, match="could not be fetched") as raised:
        broker.start(directory)
    assert_one_clear_sentence(raised.value)


def test_a_directory_that_cannot_be_one_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerError, match="cannot use its directory") as raised:
        broker.start(tmp_path / "file")
    assert_one_clear_sentence(raised.value)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_a_clear_error(directory: Path, port: int) -> None:
    with pytest.raises(BrokerError, match="from 1 to 65535"):
        broker.start(directory, port)
