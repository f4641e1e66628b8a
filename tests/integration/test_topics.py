"""A source of several topics from one end to the other: speeds that differ, silence, kills, a lost lake, and every command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cases import expected_messages
from tests.support.lakes import decisions_of
from tests.support.rivers import Losses, River, until
from tests.support.topics import published


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Of `tracking`, which has two topics, and `orders`, which has one. (The names sort other than they were made.)"""
    name = request.node.name[:40].replace("_", "-").rstrip("-")
    inputs = f"tracking/{name}.web", f"tracking/{name}.app", "orders"
    return River.make(kafka, tmp_path, name, inputs=inputs)


def inputs_of(river: River) -> tuple[str, str, str]:
    web, app, orders = river.inputs
    return web, app, orders


def test_two_topics_of_a_source_are_merged_through_kills_silence_and_the_loss_of_the_lake(river: River) -> None:
    web, app, orders = inputs_of(river)
    river.config["publish"] |= {"late_topic": f"{river.sink}-late", "quarantine_topic": f"{river.sink}-quarantine"}
    river.config["merge"]["idle_after"] = "700ms"
    river.write()
    river.flow()
    for point in ("bronze.quarantine", "silver.notes"):
        river.kill_at(point, "--once")
    river.forget_checkpoints()
    river.finish()
    assert river.losses() == Losses()

    for _ in range(3):  # one topic is faster
        river.flow(web, records=30)
    river.flow(app)
    river.flow(orders)
    river.finish()
    assert river.losses() == Losses()

    run = river.run()  # the other falls silent, and is spoken for
    until(lambda: any(source == app for source, _ in decisions_of(river.questions)), "a decision for the silent topic")
    assert run.stop() == 0, run.said()
    river.flow(app)  # and speaks again
    river.kill_at("gold.note", "--once")
    river.forget_checkpoints()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []

    rebuilt = river.folder / "rebuilt"
    assert river.run("--into", str(rebuilt), command="rebuild").wait() == 0, river.run_log
    assert river.run("--against", str(rebuilt), command="verify").wait() == 0, river.run_log

    shutil.rmtree(str(river.settings.lake))
    river.config["kafka"]["start"] = "sink"
    river.write()
    river.flow()
    river.finish()
    river.flow()
    river.finish()
    assert published(river.kafka, river.sink, river.partitions) == expected_messages(river.cases, river.inputs)
    assert river.broken_promises() == []
