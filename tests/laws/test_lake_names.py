"""The name of a lake never changes: by it, Kafka keeps a second publisher out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kafka.test_transactional_ids import left_open
from tests.support.rivers import River
from tests.support.topics import published
from watersmeet.cli import app
from watersmeet.errors import ConfigurationError, OpenTransactionError
from watersmeet.kafka import cluster
from watersmeet.kafka.permissions import transactional_id
from watersmeet.lake.identity import identity
from watersmeet.running import next_offsets
from watersmeet.settings import Settings


def test_another_name_is_refused_before_anything_is_published(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "name-kept", partitions=1)
    river.flow()
    river.finish()
    out = published(kafka, river.sink, 1)
    river.flow()
    river.config["name"] = "other"
    river.write()
    with pytest.raises(
        ConfigurationError,
        match="name: the lake was begun as `name-kept`, and as `other` Kafka would",
    ):
        river.finish()
    answer = CliRunner().invoke(app, ["validate", "-c", str(river.file)])
    assert (answer.exit_code, "begun as" in answer.output) == (2, True)
    assert published(kafka, river.sink, 1) == out


def test_a_lake_that_does_not_know_its_name_keeps_that_of_its_next_start(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(settings: Settings, partitions: int, topic_ids: Mapping[str, str]) -> dict[str, str]:
        """What an earlier version kept."""
        facts = identity(settings, partitions, topic_ids)
        del facts["name"]
        return facts

    river = River.make(kafka, tmp_path, "name-before", partitions=1)
    monkeypatch.setattr(next_offsets, "identity", before)
    river.finish()
    monkeypatch.undo()
    river.finish()
    river.config["name"] = "other"
    river.write()
    with pytest.raises(ConfigurationError, match="begun as `name-before`"):
        river.finish()


@pytest.mark.long
def test_a_lost_lake_is_taken_up_from_a_sink_without_open_transactions_alone(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SETTLING_S", 0.3)
    river = River.make(kafka, tmp_path, "name-lost", partitions=1, kafka__start="sink")
    river.flow()
    river.finish()
    shutil.rmtree(str(river.settings.lake))
    with left_open(kafka, river.sink, "another") as owner:
        with pytest.raises(OpenTransactionError):
            river.finish()
        owner.abort_transaction(30)
    shutil.rmtree(str(river.settings.lake))
    with left_open(kafka, river.sink, transactional_id("name-lost", river.sink)):
        river.finish()
    assert river.losses().repeated == 0
