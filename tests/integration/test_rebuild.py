"""`rebuild` gives silver again from bronze alone, through resets and idle decisions, and under another timeout; the comparison
finds whatever is not the same.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner

from pipelines import tables
from pipelines.adapters.decisions import write_decisions
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session
from pipelines.audit.compare import verify_against
from pipelines.audit.rebuild import rebuild, rebuilt_settings
from pipelines.audit.show import rebuild_view
from pipelines.cli import app
from pipelines.core.idle import Decision
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.errors import ConfigurationError
from pipelines.silver import Silver
from tests.support.cases import SOURCES, Case, expected_silver, keyed, random_case
from tests.support.lakes import CaseLake, late_of, settings_for, silver_of, write_configuration

RANDOM = 3
IDLE = RANDOM


@dataclass
class Rebuilt:
    """A lake with a past, and two rebuilds of it: one made at its end, one on the way, before it went on."""

    spark: SparkSession
    lake: CaseLake
    again: Path
    on_the_way: Path
    told: list[int]
    found: dict[str, Any]

    def copy(self, folder: Path) -> Lake:
        """The lake once more, to break."""
        shutil.copytree(str(self.lake.settings.lake), folder / "lake")
        return Lake(layer_session(self.spark), self.lake.settings.model_copy(update={"lake": str(folder / "lake")}))


def rich_cases() -> dict[int, Case]:
    """Those with most late and open records, by partition."""
    every = [random_case(seed) for seed in range(200)]
    return dict(enumerate(sorted(every, key=lambda case: -len(case.merged().late) - len(case.merged().open))[:RANDOM]))


def jump(lake: CaseLake, *, back: bool) -> None:
    """A deliberate reset: in every other partition forward by two offsets, in the others to the beginning (or nowhere)."""
    silver = Silver(lake.lake, lake.settings, lake.partitions)
    ranges = {}
    for tp, at in silver.cursors.items():
        until = at.next_offset + 2 if tp.partition % 2 else 0 if back else at.next_offset
        ranges[tp] = OffsetRange(at.next_offset, until, None, None, None)
    silver.commit(BatchPlan(silver.next_batch, ranges, {}, has_late=False, reset="reset --to a test"))


@pytest.fixture(scope="module")
def rebuilt(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Rebuilt:
    """Small batches, a partition in which the idle policy has spoken, a jump back and one ahead, and records that still wait."""
    folder: Path = tmp_path_factory.mktemp("rebuilt")
    cases = rich_cases()
    silent: dict[str, list[bytes | None]] = {
        "tracking": [keyed("i", t) for t in (10, 50, 200, 400, 450)],
        "orders": [keyed("i", 20)],
    }
    cases[IDLE] = Case(silent, 100, ["tracking"] * 4 + ["orders", "tracking"])
    settings = settings_for(folder, merge__max_records_per_batch=20 * 2 * len(cases), publish__valid="size(orders) > 0")
    lake = CaseLake(layer_session(root_session), settings, cases)
    lake.arrive(0.4)
    lake.merge()
    cursor = Silver(lake.lake, settings, lake.partitions).cursors[TopicPartition("orders", IDLE)]
    decisions = [Decision(cursor.next_offset - 1, time) for time in (200, 400)]
    write_decisions(lake.lake, settings, [(TopicPartition("orders", IDLE), decision) for decision in decisions])
    lake.arrive(0.7)
    lake.merge()
    jump(lake, back=True)
    lake.arrive(0.8)
    lake.merge()
    rebuild(lake.lake, settings, folder / "on_the_way")
    jump(lake, back=False)
    lake.arrive()
    lake.merge()
    told: list[int] = []
    merge = settings.merge.model_copy(update={"max_records_per_batch": 10**6})
    once = settings.model_copy(update={"merge": merge})
    found = rebuild(lake.lake, once, folder / "again", tell=lambda plan: told.append(plan.batch))
    return Rebuilt(root_session, lake, folder / "again", folder / "on_the_way", told, found)


def test_a_rebuild_is_equal_in_every_content_column_however_it_is_cut(rebuilt: Rebuilt) -> None:
    lake = rebuilt.lake
    again = Lake(layer_session(rebuilt.spark), rebuilt_settings(lake.settings, rebuilt.again))
    assert silver_of(again) == lake.silver()
    assert late_of(again) == late_of(lake.lake)
    assert rebuilt.found["lake"] == rebuilt.found["rebuilt"]
    assert rebuilt.found["lake"]["open"] > 0 < rebuilt.found["lake"]["timed_out"]
    assert len(rebuilt.told) < lake.lake.rows("SELECT MAX(batch) FROM {progress}")[0][0], "in other batches"
    assert not (rebuilt.again / "bronze_tracking").exists(), "from the lake's own bronze"
    reset = "SELECT COUNT(*) FROM {silver} WHERE invalid_reason = 'reset'"
    assert again.rows(reset) == lake.lake.rows(reset) != [(0,)], "through the resets"
    assert any(row[0] == IDLE and row[2] == "timed_out" for row in lake.silver()), "with the idle policy's decisions"


def test_a_rebuild_is_compared_with_the_version_that_it_repeats(rebuilt: Rebuilt) -> None:
    lake = rebuilt.lake
    assert verify_against(lake.lake, lake.settings, rebuilt.again) == {"ok": True, "problems": []}
    earlier = Lake(layer_session(rebuilt.spark), rebuilt_settings(lake.settings, rebuilt.on_the_way))
    assert silver_of(earlier) != lake.silver(), "the lake has gone on"
    assert verify_against(lake.lake, lake.settings, rebuilt.on_the_way) == {"ok": True, "problems": []}


def parts_of(row: tuple[object, ...], source: int) -> tuple[object, ...]:
    parts = row[5 + source]
    assert isinstance(parts, tuple)
    return parts


def test_under_another_timeout_it_is_what_the_model_makes_of_it(spark: SparkSession, tmp_path: Path) -> None:
    cases = rich_cases()
    lake = CaseLake(spark, settings_for(tmp_path), cases)
    lake.arrive()
    lake.merge()
    found = rebuild(lake.lake, lake.settings, tmp_path / "longer", timeout_ms=300)
    longer = {p: replace(case, timeout_ms=300) for p, case in cases.items()}
    rows = silver_of(Lake(spark, rebuilt_settings(lake.settings, tmp_path / "longer")))
    assert rows == expected_silver(longer) != expected_silver(cases)
    complete = [row for row in rows if all(row[5:])]
    rebuilt: dict[str, Any] = found["rebuilt"]
    assert (rebuilt["records"], rebuilt["complete"]) == (len(rows), len(complete))
    for i, source in enumerate(SOURCES):
        merged, in_complete = (sum(len(parts_of(row, i)) for row in these) for these in (rows, complete))
        late = sum(each.record.source == source for case in longer.values() for each in case.merged().late)
        assert rebuilt["sources"][source] == {"merged": merged, "in_complete_records": in_complete, "late": late}
    with pytest.raises(ConfigurationError, match="was derived with a timeout of 300 ms"):
        verify_against(lake.lake, lake.settings, tmp_path / "longer")


def test_a_difference_is_found_and_told_with_its_place(rebuilt: Rebuilt, tmp_path: Path) -> None:
    settings, lake = rebuilt.lake.settings, rebuilt.copy(tmp_path)

    def problems() -> list[dict[str, str]]:
        found = verify_against(lake, settings, rebuilt.again)
        assert found["ok"] == (not found["problems"])
        return list(found["problems"])

    silver = lake.delta(tables.SILVER)
    timed_out = lake.rows("SELECT `partition`, merge_key, event_time FROM {silver} WHERE status = 'timed_out'")
    partition, key, time = min(timed_out, key=str)
    is_it = f"partition = {partition} AND merge_key = '{key}' AND unix_millis(event_time) = {time}"
    silver.update(is_it, {"last_event_time": "event_time + INTERVAL 1 DAY"})
    assert [problem["what"] for problem in problems()] == ["the rebuild has another last_event_time"]
    silver.delete(is_it)
    [problem] = problems()
    assert problem["what"] == "only the rebuild has it"
    assert repr(key) in problem["where"]
    lake.delta(tables.LATE).update(set={"value": "CAST('x' AS BINARY)"})
    assert {problem["what"] for problem in problems()[1:]} == {"the rebuild has another value"}


def test_the_commands_rebuild_and_compare(rebuilt: Rebuilt, tmp_path: Path) -> None:
    lake = rebuilt.copy(tmp_path)
    config = write_configuration(rebuilt.lake.settings.model_copy(update={"lake": str(tmp_path / "lake")}), tmp_path)
    runner = CliRunner()
    found = runner.invoke(app, ["rebuild", "--into", str(tmp_path / "longer"), "--timeout", "1s", "--json", "-c", str(config)])
    document = json.loads(found.stdout)
    assert (found.exit_code, document["timeout_ms"]) == (0, {"lake": 100, "rebuilt": 1000})
    assert document["lake"] == rebuilt.found["lake"] != document["rebuilt"]
    same = runner.invoke(app, ["verify", "--against", str(rebuilt.again), "-c", str(config)])
    assert same.exit_code == 0
    lake.delta(tables.SILVER).delete("status = 'timed_out'")
    broken = runner.invoke(app, ["verify", "--against", str(rebuilt.again), "--json", "-c", str(config)])
    assert broken.exit_code == 3
    assert len(json.loads(broken.stdout)["problems"]) > 1


def test_the_comparison_is_shown_side_by_side(rebuilt: Rebuilt) -> None:
    console = Console(width=120, file=io.StringIO())
    console.print(rebuild_view({**rebuilt.found, "timeout_ms": {"lake": 100, "rebuilt": 3_600_000}}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "rebuilt, T = 1h" in shown
    assert f"{rebuilt.found['lake']['complete']:,}" in shown


def test_what_cannot_be_is_refused_in_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    empty = Lake(spark, settings)
    with pytest.raises(ConfigurationError, match="silver has merged nothing yet"):
        rebuild(empty, settings, tmp_path / "again")
    lake = CaseLake(spark, settings, {0: random_case(1)})
    lake.arrive()
    lake.merge()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(ConfigurationError, match="is not an empty folder"):
        rebuild(lake.lake, settings, tmp_path / "full")
    with pytest.raises(ConfigurationError, match="holds no complete rebuild"):
        verify_against(lake.lake, settings, tmp_path / "full")
