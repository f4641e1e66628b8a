"""How far the layers are, as Kafka's own tools see it; what cannot be committed stops nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.rivers import until
from tests.support.secured import SecuredBroker
from tests.support.topics import committed, create_topics
from watersmeet.kafka.groups import Group, Groups
from watersmeet.kafka.permissions import Permission
from watersmeet.monitoring.events import BronzeProgress, MergeProgress, SourceStanding
from watersmeet.settings import KafkaSettings, Settings


def settings_of(folder: Path, topic: str, kafka: KafkaSettings) -> Settings:
    settings = settings_for(folder, name=topic, sources__tracking__topic=topic)
    return settings.model_copy(update={"kafka": kafka})


def test_each_layer_commits_its_offsets_to_its_group(
    settings: KafkaSettings, topic: str, tmp_path: Path
) -> None:
    create_topics(settings.bootstrap_servers, topic, partitions=2)
    groups = Groups(settings_of(tmp_path, topic, settings))
    first, second = tp_of(f"tracking/{topic}", 0), tp_of(f"tracking/{topic}", 1)
    groups(BronzeProgress({first: 5}))
    groups(BronzeProgress({second: 3}))
    groups(
        MergeProgress(
            {},
            {
                first: SourceStanding(4, 1, 1, "active"),
                second: SourceStanding(0, None, None, "waiting"),
            },
        )
    )

    def are(bronze: dict[int, int], silver: dict[int, int]) -> bool:
        groups.commit()  # a broker that has just been started has no coordinator yet
        names = [f"watersmeet-{topic}-{layer}" for layer in ("bronze", "silver")]
        return [committed(settings.bootstrap_servers, name, topic, 2) for name in names] == [
            bronze,
            silver,
        ]

    until(lambda: are({0: 5, 1: 3}, {0: 4, 1: 0}), "the offsets of both layers")
    groups(BronzeProgress({first: 6}))
    until(lambda: are({0: 6, 1: 3}, {0: 4, 1: 0}), "the offset after another batch")


@pytest.mark.long
def test_a_group_that_may_not_be_committed_to_is_one_warning(
    secured: SecuredBroker, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_topics(secured.admin, topic, partitions=1)
    secured.grant("reader", Permission("READ", "topic", topic, ""))
    groups, tp = (
        Groups(settings_of(tmp_path, topic, secured.settings())),
        tp_of(f"tracking/{topic}", 0),
    )

    def warnings(offset: int) -> list[str]:
        groups(BronzeProgress({tp: offset}))
        groups.commit()
        return [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]

    until(lambda: len(warnings(1)) == 1, "the warning")
    [warning] = warnings(2)
    group = f"watersmeet-{topic}-bronze"
    assert f"does not allow READ on consumer group {group} " in warning
    assert "the run goes on" in warning
    secured.grant("reader", Permission("READ", "group", group, ""))
    until(
        lambda: [warnings(3), committed(secured.admin, group, topic, 1)] == [[warning], {0: 3}],
        "the offset after all",
    )


def test_a_group_that_somebody_has_joined_is_one_warning(
    settings: KafkaSettings, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create_topics(settings.bootstrap_servers, topic, partitions=1)
    groups = Groups(settings_of(tmp_path, topic, settings))
    member = Consumer(
        {"bootstrap.servers": settings.bootstrap_servers, "group.id": groups.name("bronze")}
    )
    member.subscribe([topic])
    until(lambda: member.poll(0.1) is not None or bool(member.assignment()), "the member")
    try:
        for offset in (1, 2):
            groups(BronzeProgress({tp_of(f"tracking/{topic}", 0): offset}))
            groups.commit()
    finally:
        member.close()
    assert [
        record.getMessage().partition(";")[0]
        for record in caplog.records
        if "watersmeet" in record.name
    ] != []
    assert len([record for record in caplog.records if record.name == "watersmeet.groups"]) == 1


def test_a_coordinator_that_has_just_moved_is_asked_again(
    settings: KafkaSettings, topic: str
) -> None:
    moved = [KafkaError(KafkaError.NOT_COORDINATOR), KafkaError(KafkaError._WAIT_COORD)]

    class Moving(Group):
        def _answer(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
            super()._answer(moved.pop() if moved else error, [] if moved else partitions)

    create_topics(settings.bootstrap_servers, topic, partitions=1)
    Moving(settings, topic).commit({(topic, 0): 3})
    assert not moved
    assert committed(settings.bootstrap_servers, topic, topic, 1) == {0: 3}


def test_a_broker_that_is_away_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watersmeet.kafka.groups.TIMEOUT_S", 1.5)
    groups = Groups(settings_of(tmp_path, "any", KafkaSettings(bootstrap_servers="127.0.0.1:1")))
    groups(BronzeProgress({tp_of("tracking/any", 0): 1}))
    groups.commit()
    assert [record for record in caplog.records if record.name == "watersmeet.groups"] == []
