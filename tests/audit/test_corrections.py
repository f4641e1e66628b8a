"""What the commands tell of corrections is what their model makes of the same records."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ask.test_report import COUNTS, rows
from tests.audit.inputs import case_of
from tests.audit.test_show import read
from tests.laws.test_corrections import ALL_MS, corrections
from tests.support.cases import SOURCES, Case, cases_with_ids, heartbeat, keyed, rich_cases
from tests.support.configurations import IDS, settings_for
from tests.support.corrections import CorrectionModels, late_duplicates_of
from tests.support.lakes import CaseLake
from watersmeet.ask.explain import explain
from watersmeet.ask.report import read_report
from watersmeet.ask.sql import ask
from watersmeet.ask.status import status
from watersmeet.audit.show import explain_view, status_view
from watersmeet.core.correction_model import Correction
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.published import topic_columns
from watersmeet.lake.views import derived_views
from watersmeet.operations.retention import expire
from watersmeet.running.outcomes import outcomes

PAGE = Path(__file__).parents[2] / "docs" / "corrections.md"
PARTITIONS = 24
MOST = 2
"""Versions that a merge record may have."""
AWAY_S = 0.1
NOTED = {
    "partition": 1,
    "first_seq": 0,
    "last_seq": 2,
    "committed_at": 2,
    **topic_columns("merged-corrections (1.2)"),
    "last_settled_at": 5,
    "last_tenant": "",
    "last_u": 4,
    "last_source": "orders",
    "last_topic": "orders",
    "last_offset": 3,
}
"""Three corrections that are out, as gold notes them."""


@dataclass
class Corrected:
    """A lake, the models of its partitions, and the outcomes of all of its batches, as a run counts
    them."""

    lake: CaseLake
    models: CorrectionModels
    counted: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def merge(self, share: float) -> None:
        self.lake.arrive(share)
        self.models.arrive(share)
        before = len(self.lake.plans)
        self.lake.merge()
        for plan in self.lake.plans[before:]:
            found = outcomes(self.lake.reader, self.lake.settings, plan)
            for topic, counts in found.items():
                self.counted.update(
                    {(topic, *outcome): records for outcome, records in counts.items()}
                )


def cases() -> dict[int, Case]:
    found = cases_with_ids(rich_cases(PARTITIONS))
    for case in found.values():
        for source, values in case.values.items():
            values.append(heartbeat(100_000))
            case.arrivals.append(source)
    return found


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Corrected:
    given = cases()
    folder = tmp_path_factory.mktemp("corrected")
    limited = corrections(max_versions=MOST)
    settings = settings_for(folder, engine="embedded", **limited, **IDS)
    lake = CaseLake(open_engine(settings), settings, given)
    made = Corrected(lake, CorrectionModels(given, (100, None, None), ALL_MS, max_versions=MOST))
    for share in (0.3, 0.7, 1.0):
        made.merge(share)
    published = lake.engine.lake.layout[tables.PUBLISHED]
    lake.engine.append(tables.PUBLISHED, published.rows_of([NOTED]))
    return made


def test_status_counts_corrections_and_late_duplicates(corrected: Corrected) -> None:
    lake = corrected.lake
    answer = status(lake.reader, lake.settings, AWAY_S)
    found = {row["partition"]: row for row in answer["partitions"]}
    repeated = Counter(row[0] for row in lake.duplicates())
    repeated.update(row[0] for row in late_duplicates_of(lake.reader))
    for p, model in corrected.models.corrections.items():
        assert found[p]["corrections"] == len(model.corrections)
        assert found[p]["too_many"] == len(model.too_many)
        assert found[p]["duplicates"] == repeated[p]
        assert found[p]["corrections_published"] == (3 if p == 1 else 0)
        assert found[p]["published"] == 0
    assert sum(row["corrections"] for row in found.values()) > 10
    shown = " ".join(read(status_view(answer)))
    most = max(row["corrections"] for row in found.values())
    assert f" corrections {most} " in shown
    assert f" too many {max(row['too_many'] for row in found.values())} " in shown
    assert " corrections published 3" in shown


def test_each_outcome_of_late_records_is_counted_as_the_tables_have_it(
    corrected: Corrected,
) -> None:
    reader = corrected.lake.reader

    def by_topic(table: str, *more: str) -> Counter[tuple[object, ...]]:
        return Counter(
            tuple(row.values()) for row in reader.select(table, ["topic", *more]).to_pylist()
        )

    counted = corrected.counted
    repeated = by_topic(tables.DUPLICATES, "is_late")
    too_many = 0
    for (topic,), late in by_topic(tables.LATE).items():
        assert counted[str(topic), "late", ""] == late
        rows_of = by_topic(tables.CORRECTIONS, "version")
        beyond = rows_of.pop((topic, 0), 0)
        assert counted[str(topic), "not_corrected", "too_many"] == beyond
        too_many += beyond
        of_topic = [rows for (of, _), rows in rows_of.items() if of == topic]
        assert counted[str(topic), "corrected", ""] == sum(of_topic) > 0
        assert counted[str(topic), "duplicate", "late"] == repeated[topic, True] > 0
        assert counted[str(topic), "duplicate", ""] == repeated[topic, False] > 0
    assert too_many > 0
    parts = Counter[str]()
    for row in reader.select(tables.MERGED, ["status", "record_ids", *SOURCES]).to_pylist():
        for source in SOURCES:
            parts[source] += len(row[source])
        if row["status"] == "open":  # what repeats a part of it is found once it closes
            entries = [entry for entry in row["record_ids"] or () if entry["of_offset"] is not None]
            parts.update(entry["source"] for entry in entries)
    place = ["batch", "source", "partition"]
    consumed = {
        tuple(row[name] for name in place): row["from_offset"]
        for row in reader.select(tables.PROGRESS, [*place, "from_offset"]).to_pylist()
    }
    on_time = reader.select(tables.DUPLICATES, [*place, "offset"], [[("is_late", "=", False)]])
    for *at, offset in (row.values() for row in on_time.to_pylist()):
        parts[str(at[1])] += offset < consumed[tuple(at)]  # it had joined before
    for source in SOURCES:
        assert counted[source, "merged", ""] == parts[source]


def test_of_a_key_every_version_is_told_and_each_late_born_record_as_its_last_one_has_it(
    corrected: Corrected,
) -> None:
    versions = set[tuple[object, ...]]()
    newest = dict[tuple[object, ...], tuple[object, ...]]()
    for p, model in corrected.models.corrections.items():
        for each in model.corrections:
            record = (p, each.key, each.event_time, each.is_late_born)
            late = each.late.record
            versions.add((record, each.version, late.input.source, late.offset))
            if each.is_late_born:
                newest[record] = each.last_event_time, _places_of(each)
    found = list[tuple[object, ...]]()
    late_born = dict[tuple[object, ...], tuple[object, ...]]()
    for key in {str(row[6]) for row in corrected.models.rows()}:
        for told in explain(corrected.lake.reader, corrected.lake.settings, key)["records"]:
            is_late_born = told["status"] == "late_born"
            record = (told["partition"], key, told["event_time"], is_late_born)
            found += [
                (record, version["version"], version["source"], version["offset"])
                for version in told["versions"]
            ]
            if is_late_born:
                places = sorted((part["source"], part["offset"]) for part in told["parts"])
                late_born[record] = told["last_event_time"], places
    assert len(found) == len(set(found))
    assert set(found) == versions
    assert late_born == newest != {}


def _places_of(correction: Correction) -> list[tuple[str, int]]:
    parts = correction.parts.items()
    return sorted((source, part.offset) for source, of_source in parts for part in of_source)


def test_of_each_late_record_what_became_of_it_is_told(corrected: Corrected) -> None:
    outcomes_of = dict[tuple[int, str, int], str]()
    for p, model in corrected.models.corrections.items():
        for each in model.corrections:
            record = each.late.record
            outcomes_of[p, record.input.source, record.offset] = f"version {each.version} of "
        for each in model.too_many:
            record = each.late.record
            outcomes_of[p, record.input.source, record.offset] = "lets it have (too_many)"
        for repeated in model.duplicates:
            record = repeated.record
            outcomes_of[p, record.input.source, record.offset] = "its merge record has a part"
    keys = {str(row[6]) for row in corrected.models.rows()}
    told = 0
    for key in keys:
        for late in explain(corrected.lake.reader, corrected.lake.settings, key)["late"]:
            place = (late["partition"], late["source"], late["offset"])
            assert outcomes_of.get(place, "settled once") in late["outcome"]
            assert (late["corrected"] is None) == ("version" not in outcomes_of.get(place, ""))
            told += 1
    assert told > 10
    assert any("too_many" in outcome for outcome in outcomes_of.values())


def test_of_a_late_born_record_no_more_is_told_of_a_part_whose_version_keep_has_deleted(
    tmp_path: Path,
) -> None:
    tracking = [
        heartbeat(1000),
        keyed("a", 20),
        keyed("a", 100),
        heartbeat(1100),
        heartbeat(30_500),
    ]
    case = case_of(tracking, [*tracking[::3], tracking[-1]])
    corrected_within = {"topic": "merged-corrections", "within": "20s"}
    keep = {"silver": "30440ms", "late": "1d"}
    settings = settings_for(tmp_path, keep=keep, publish__corrections=corrected_within)
    lake = CaseLake(open_engine(settings), settings, {0: case})
    lake.arrive(0.75)
    lake.merge()
    lake.arrive()
    lake.merge()
    out = lake.engine.lake.layout[tables.PUBLISHED].rows_of(
        [NOTED | {"partition": 0, "last_settled_at": 20_000}]
    )
    lake.engine.append(tables.PUBLISHED, out)
    expire(lake.owner(), settings, tables.SILVER)
    found = explain(lake.reader, settings, "a")
    [record] = found["records"]
    assert [version["version"] for version in record["versions"]] == [2]
    names = ("event_time", "rule", "position", "batch", "version")
    first, second = [tuple(part[name] for name in names) for part in record["parts"]]
    assert first == (20, "opened", None, None, None)
    assert second[:3] == (100, "joined", 1000)
    assert None not in second
    of_first, of_second = [late["outcome"] for late in found["late"]]
    assert of_first == "settled; `keep` has deleted what came of it"
    assert "version 2 of" in of_second
    assert explain_view(found)


def test_corrected_has_each_merge_record_as_its_last_correction_left_it(
    corrected: Corrected,
) -> None:
    lake = corrected.lake
    rows = ask(lake.reader, lake.settings, "SELECT * FROM corrected").read_all().to_pylist()
    found = Counter(
        (row["partition"], source, part["offset"])
        for row in rows
        for source in SOURCES
        for part in row[source]
    )
    repeated = {
        (p, each.record.input.source, each.record.offset)
        for p, model in corrected.models.corrections.items()
        for each in model.duplicates
    }
    assert max(row["version"] for row in rows) > 1
    assert found == corrected.models.newest()
    assert not found.keys() & repeated


def test_the_report_counts_corrections_beside_what_is_published(corrected: Corrected) -> None:
    report = read_report(corrected.lake.reader, corrected.lake.settings, 0)
    [of_all, *_] = rows(report, COUNTS)
    made = [row for row in corrected.models.rows() if row[9]]
    assert of_all["corrections"] == len(made) < len(corrected.models.rows())
    assert of_all["published"] == 0


def test_a_lake_without_corrections_shows_none(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    lake = CaseLake(open_engine(settings), settings, cases())
    lake.arrive()
    lake.merge()
    answer = status(lake.reader, settings, AWAY_S)
    assert {row["corrections"] for row in answer["partitions"]} == {0}
    assert "corrections" not in " ".join(read(status_view(answer)))
    assert "corrections" not in rows(read_report(lake.reader, settings, 0), COUNTS)[0]
    counts = outcomes(lake.reader, settings, lake.plans[-1])
    assert "corrected" not in {outcome for of in counts.values() for outcome, _ in of}


def test_the_documented_view_is_that_of_a_catalog() -> None:
    """Its query is a catalog's but for the names of the views."""
    view = derived_views(settings_for(Path("/nowhere"), **corrections()))[tables.CORRECTED]
    query = view.of({name: name for name in view.reads})
    [statement] = re.findall("```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    documented = statement.removeprefix("CREATE VIEW corrected AS\n")
    assert documented.split() == query.replace("`", "").split()
