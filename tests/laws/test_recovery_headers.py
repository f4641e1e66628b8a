"""The headers from which a lost lake is taken up: on one message of a partition in a transaction,
however many share its time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import SOURCES, Case, expected_messages, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake
from tests.support.topics import consume, create_topics
from watersmeet.core import recovery
from watersmeet.core.idle import IdleDecision
from watersmeet.core.silver import in_silver
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import read_history
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import decision_rows, read_decisions
from watersmeet.run import create_missing
from watersmeet.running.generations import begin_first
from watersmeet.running.owner import Owner


def test_of_many_messages_of_one_time_the_last_alone_has_them(kafka: str, tmp_path: Path) -> None:
    values: list[bytes | None] = [keyed(f"k{i:02d}", 5) for i in range(50)]
    case = Case(
        {"tracking": [*values, heartbeat(10**6)], "orders": [heartbeat(10**6)]},
        100,
        ["tracking"] * 51 + ["orders"],
    )
    settings = settings_for(
        tmp_path, bootstrap=kafka, publish__topic="recovery-headers", name="recovery"
    )
    lake = CaseLake(open_engine(settings), settings, {0: case, 1: case})
    lake.arrive()
    lake.merge()
    [publications] = lake.publish()
    found = consume(kafka, "recovery-headers", 2)
    having = [
        (m.partition(), m.offset()) for m in found if "watersmeet.min_offsets" in dict(m.headers())
    ]
    assert having == [(p.partition, p.tail.offset) for p in publications] == [(0, 49), (1, 49)]
    assert lake.messages() == expected_messages(lake.cases)


@pytest.mark.long
@pytest.mark.promise("N33")
@pytest.mark.fault("lost", "silence")
def test_what_thousands_of_tenants_were_told_fits_into_a_message_or_the_message_says_so(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing goes on in either case; a lost lake has the same decisions again, or is
    refused."""
    tenants = {
        f"tenant {n:05d} of very many, each of which has a name of its own": 900 + n % 90
        for n in range(15_000)
    }
    values: list[bytes | None] = [keyed(f"k{n:02d}", 5 + n, g="tenant 00007") for n in range(9)]
    case = Case(
        {"tracking": [*values, heartbeat(1000)], "orders": [heartbeat(10)]},
        100,
        ["tracking"] * 10 + ["orders"],
    )
    merge = {"timeout": "100ms", "tenant": "g", "tenant_max_lag": "500ms"}
    for name, limit in (("many-tenants", recovery.RECOVERY_BYTES), ("too-many-tenants", 20_000)):
        monkeypatch.setattr(recovery, "RECOVERY_BYTES", limit)
        (folder := tmp_path / name).mkdir()
        topics = {f"sources__{source}__topic": f"{name}_{source}" for source in SOURCES}
        settings = settings_for(
            folder, bootstrap=kafka, publish__topic=name, name=name, merge=merge, **topics
        )
        create_topics(kafka, *topics.values(), partitions=1)
        lake = CaseLake(open_engine(settings), settings, {0: case})
        lake.arrive()
        lake.merge()
        decision = IdleDecision(0, 1000, tuple(sorted(tenants.items())))
        decided = [(tp_of(f"orders/{topics['sources__orders__topic']}", 0), decision)]
        idle = decision_rows(decided, 1, 0, 0)
        lake.owner().append(
            tables.SILVER,
            in_silver(idle, "idle", lake.engine.lake.schema(tables.SILVER)),
            tables.BESIDE,
        )
        lake.merge()
        assert lake.publish(), "it goes on"
        largest = max(
            sum(len(key) + len(value) for key, value in m.headers())
            for m in consume(kafka, name, 1)
        )
        assert largest < recovery.RECOVERY_BYTES + 1000

        lost = settings.model_copy(
            update={
                "lake": str(folder / "again"),
                "kafka": settings.kafka.model_copy(update={"start": "sink"}),
            }
        )
        engine = open_engine(lost)
        create_missing(engine)
        if name == "too-many-tenants":
            with pytest.raises(ConfigurationError, match="does not say where a lost lake goes on"):
                begin_first(Owner(engine), lost, 1)
        else:
            begin_first(Owner(engine), lost, 1)
            assert (
                list(
                    read_decisions(
                        DeltaRsReader(Lake(lost)),
                        read_history(engine.reader, lost).generations.newest,
                    )
                )
                == decided
            )
