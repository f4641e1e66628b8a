"""Repartition on a secured broker: it has just the permissions that it needs, and says which one it
misses."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.configurations import settings_for
from tests.support.repartitioning import Raws, confluence, copied, raws
from tests.support.rivers import River, until
from tests.support.secured import SecuredBroker
from tests.support.topics import committed
from watersmeet.dev import secure
from watersmeet.kafka.permissions import Permission, permissions
from watersmeet.settings import Settings

pytestmark = [pytest.mark.long, pytest.mark.promise("N4"), pytest.mark.fault("outage")]

COUNTS = ((1, 2), 1)
PARTITIONS = 2
SECONDS = 60
"""A process is up, has found the cause and is gone: some seconds, more on a busy machine. What may
pass is waited for longer."""


class SortKey(NamedTuple):
    """A confluence, and what its topics hold."""

    river: River
    inputs: dict[str, Raws]

    def flow(self) -> None:
        for raw in self.inputs.values():
            raw.flow(len(raw[0].values[0]), 0, records=6)

    def assert_written(self) -> None:
        """Each record once, in its place."""
        for source, raw in self.inputs.items():
            found = copied(
                self.river.kafka, self.river.settings.inputs_by_name[source].topic, PARTITIONS
            )
            expected = raw.expected(PARTITIONS)
            assert {p: Counter(copies) for p, copies in found.items()} == {
                p: Counter(copies) for p, copies in expected.items()
            }


def of_stage(settings: Settings) -> list[Permission]:
    """What who only calls `watersmeet repartition` needs, as docs/kafka.md says."""
    written = sorted({settings.inputs_by_name[name].topic for name in settings.repartitioned})
    group = f"watersmeet-{settings.name}-repartition"
    mine = [one for one in permissions(settings) if "repartition" in one.why or one.name == group]
    return [*(Permission("READ", "topic", topic, "where it stands") for topic in written), *mine]


@pytest.fixture
def place(
    secured: SecuredBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SortKey]:
    """Its runs log in as the broker's own user, which may do just what repartitioning needs."""
    monkeypatch.setenv(secure.PASSWORD_VARIABLE, secured.own_password)
    river = confluence(
        secured.admin, tmp_path / "river", topic[-80:].strip("-"), COUNTS, PARTITIONS
    )
    river.config["kafka"] |= {
        "bootstrap_servers": secured.servers,
        "options": secure.user_options(secured.status.directory),
    }
    river.write()
    needed = of_stage(river.settings)
    secured.grant(secure.USER, *needed)
    found = SortKey(river, raws(river, COUNTS))
    found.flow()
    yield found
    secured.revoke(secure.USER, *needed)


def run(river: River, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "watersmeet", *words, "-c", str(river.file)]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=river.folder
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence that it ended with."""
    assert done.returncode == 1, done
    *_, last = done.stderr.splitlines()
    assert last.startswith("watersmeet: "), done.stderr
    assert "Traceback" not in done.stderr
    return last


def test_it_writes_and_goes_on_with_what_it_is_allowed_and_tells_nobody_its_password(
    secured: SecuredBroker, place: SortKey
) -> None:
    done = [run(place.river, "repartition", "--once")]
    place.flow()
    done.append(run(place.river, "repartition", "--once", "--json"))
    assert [each.returncode for each in done] == [0, 0], done
    place.assert_written()
    assert [each for each in done if "do not show the lag" in each.stderr] == []
    assert [each for each in done if secured.own_password in each.stdout + each.stderr] == []
    group = f"watersmeet-{place.river.settings.name}-repartition"
    for raw in (raw for of_source in place.inputs.values() for raw in of_source):
        ends = {p: len(values) for p, values in raw.values.items()}
        assert committed(secured.admin, group, raw.topic, len(ends)) == ends


def named(source: str, origin: str | list[str]) -> dict[str, Any]:
    return {
        f"sources__{source}__topic": source,
        f"sources__{source}__repartition": {"from": origin, "partitions": PARTITIONS},
    }


LIKE_ALL = of_stage(
    settings_for(Path("/"), **named("tracking", ["raw-0", "raw-1"]), **named("orders", "raw-2"))
)
"""Those of each place have the same order."""
NEEDED = [i for i, one in enumerate(LIKE_ALL) if one.kind != "group"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number", NEEDED, ids=lambda i: f"{LIKE_ALL[i].operation}-{LIKE_ALL[i].name}"
)
def test_a_missing_permission_is_one_sentence_and_nothing_is_lost(
    secured: SecuredBroker, place: SortKey, number: int
) -> None:
    missing = of_stage(place.river.settings)[number]
    if missing.why == "where it stands":  # which is not read while it is empty
        assert run(place.river, "repartition", "--once").returncode == 0
        place.flow()
    secured.revoke(secure.USER, missing)
    said = sentence(run(place.river, "repartition", "--once"))
    assert f"on {missing.kind} {missing.name} " in said
    assert (
        f"does not allow {missing.operation} " in said
        or f"grant {missing.operation}, which includes it," in said
    )

    secured.grant(secure.USER, missing)
    assert run(place.river, "repartition", "--once").returncode == 0
    place.assert_written()


@pytest.mark.nightly
def test_without_the_group_it_works_and_says_that_kafkas_own_tools_do_not_show_the_lag(
    secured: SecuredBroker, place: SortKey
) -> None:
    [group, *_] = [one for one in of_stage(place.river.settings) if one.kind == "group"]
    secured.revoke(secure.USER, group)
    done = run(place.river, "repartition", "--once")
    assert done.returncode == 0
    assert f"does not allow READ on consumer group {group.name}" in done.stderr
    assert "do not show the lag" in done.stderr
    place.assert_written()


@pytest.mark.nightly
def test_validate_names_the_permission_that_it_misses(
    secured: SecuredBroker, place: SortKey
) -> None:
    place.river.config["publish"]["late_topic"] = f"{place.river.sink}-late"
    place.river.write()
    every = permissions(place.river.settings)
    secured.grant(secure.USER, *every)
    assert run(place.river, "repartition", "--once").returncode == 0
    done = run(place.river, "validate", "--json")
    assert done.returncode == 0, done
    topics = {one.name for one in every if one.operation == "DESCRIBE_CONFIGS"} & {
        one.name for one in of_stage(place.river.settings)
    }
    assert len(topics) == 5
    for missing in [
        one for one in every if one.operation == "DESCRIBE_CONFIGS" and one.name in topics
    ]:
        secured.revoke(secure.USER, missing)
        done = run(place.river, "validate", "--json")
        assert done.returncode == 2
        assert f"does not allow DESCRIBE_CONFIGS on topic {missing.name}" in done.stdout
        secured.grant(secure.USER, missing)
    secured.revoke(secure.USER, *every)


@pytest.mark.nightly
def test_a_permission_that_is_taken_away_under_way_ends_it_and_nothing_is_lost(
    secured: SecuredBroker, place: SortKey
) -> None:
    process = place.river.run(command="repartition")
    try:
        until(
            lambda: "records written to" in process.said() or process.process.poll() is not None,
            "the first records",
        )
        [missing, *_] = [
            one for one in of_stage(place.river.settings) if one.why == "`repartition` reads it"
        ]
        secured.revoke(secure.USER, missing)
        place.flow()
        assert process.wait(SECONDS) == 1, process.said()
    finally:
        process.kill()
    *_, last = process.said().splitlines()
    assert last.startswith("watersmeet: ")
    assert "does not allow" in last
    assert f" on topic {missing.name} " in last
    secured.grant(secure.USER, missing)
    assert run(place.river, "repartition", "--once").returncode == 0
    place.assert_written()
