"""The report's page from plain data: it holds what it is told as text, needs nothing else, and mixes no two kinds of time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipelines.audit.report import (
    Arrivals,
    LastBatch,
    PartitionCounts,
    Report,
    check_writable,
    furthest_behind,
    write_page,
)
from pipelines.audit.report_charts import clock_chart, delay_chart, lead_chart, match_chart, open_chart, rate_chart
from pipelines.audit.report_drawing import COLOURS, TimeAxis, time_format, unit_for
from pipelines.audit.report_merge import Column, EventTime, MatchedIn, OpenIn, Refused
from pipelines.audit.report_page import page
from pipelines.audit.report_sections import sections
from pipelines.audit.report_steps import WIDTHS, Steps, in_each, steps_over
from pipelines.audit.report_wall import HELD, IDLE, ClockAt, CountIn, DelayIn, LeadIn, Stretch, WallTime
from pipelines.errors import ConfigurationError

HOUR, DAY = 3_600_000, 86_400_000
NOW = 1_767_261_600_000
"""2026-01-01 10:00 UTC."""

YEAR_9999 = 253_402_300_799_999
NASTY = "</script><script>alert(1)</script>&\"'"

WALL, EVENT = Steps(NOW, 1000, 4), Steps(NOW - DAY, HOUR, 3)


def report_of(**changed: Any) -> Report:
    """A lake of two partitions with something in every chart."""
    wall = WallTime(
        WALL,
        WALL,
        clocks=[ClockAt(0, NOW + 1000, NOW - DAY), ClockAt(0, NOW + 2000, None), ClockAt(1, NOW + 4000, NOW - HOUR)],
        leads=[LeadIn("tracking", 0, NOW, 90_000), LeadIn("orders", 0, NOW, 0)],
        stretches=[Stretch("tracking", 0, HELD, NOW, NOW + 2000), Stretch("orders", 1, IDLE, NOW, NOW + 1000)],
        merged=[CountIn(source, at, 7) for source in ("tracking", "orders") for at in WALL.starts],
        published=[CountIn("published", at, 3) for at in WALL.starts],
        ages=[DelayIn("clock", NOW, -500, 100, 2000)],
        merges=[DelayIn("merge", NOW, 10, 20, 30)],
        to_silver=[DelayIn("tracking", NOW, 100, 200, 300), DelayIn("orders", NOW, 100, 200, 300)],
        to_gold=[DelayIn("silver to gold", NOW, 10, 20, 30)],
    )
    matched = [MatchedIn(EVENT.first, 4, (4, 1), 1)]
    report = Report(
        name="shop",
        place="/lakes/shop",
        made_at=NOW,
        sources=("tracking", "orders"),
        timeout_ms=1_800_000,
        idle_after_ms=None,
        last=LastBatch(1234, NOW),
        partitions=[PartitionCounts(0, NOW - DAY, 1000, 2, 3, 4, 5, 6), PartitionCounts(1, None)],
        shown=[0, 1],
        wall=wall,
        arrivals=Arrivals(WALL, [CountIn("tracking", at, 5) for at in WALL.starts]),
        events=EventTime(EVENT, NOW - DAY + HOUR, [OpenIn(EVENT.first, 2.5)], EVENT, matched),
        refused=[Refused("late", "tracking", 12), Refused("no_key", "orders", 3)],
        sizes=[Column(1, 1, 3), Column(2, 2, 0), Column(3, 3, 1)],
        durations=[Column(0, 0, 3), Column(1, 1000, 1)],
    )
    return report._replace(**changed)


def empty() -> Report:
    nothing: dict[str, Any] = {"wall": None, "arrivals": None, "events": None, "last": None}
    return report_of(**nothing, partitions=[], shown=[], refused=[], sizes=[], durations=[])


class _Text(HTMLParser):
    """What a reader sees, and the elements with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._in = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, _: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in == "script" else self.texts).append(data)


@pytest.fixture(scope="module")
def whole() -> _Text:
    return _Text(page(report_of()))


def specs_of(report: Report) -> dict[str, Any]:
    return {f.title: f.draw() for section in sections(report) for f in section.figures if f.draw is not None}


def encodings(spec: Any) -> Iterator[dict[str, Any]]:
    """Every encoding in a specification, however deep."""
    if isinstance(spec, dict):
        if isinstance(spec.get("encoding"), dict):
            yield spec["encoding"]
        for inner in spec.values():
            yield from encodings(inner)
    elif isinstance(spec, list):
        for inner in spec:
            yield from encodings(inner)


def rows_of(spec: Any) -> list[dict[str, Any]]:
    return [row for rows in spec["datasets"].values() for row in rows]


# -- the page


def test_nothing_is_loaded(whole: _Text) -> None:
    attributes = {name for _, attrs in whole.elements for name in attrs}
    assert attributes.isdisjoint({"src", "href", "srcset", "data", "action"})
    assert {tag for tag, _ in whole.elements}.isdisjoint({"link", "iframe", "object", "embed", "base", "img"})
    [policy] = [attrs["content"] for tag, attrs in whole.elements if tag == "meta" and "content" in attrs]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "connect-src" not in policy
    style = "".join(whole.texts)
    assert "@import" not in style
    assert "url(" not in style


def test_the_library_is_in_it_once_and_every_chart_has_its_place(whole: _Text) -> None:
    library, charts = whole.scripts
    assert 500_000 < len(library) < 1_500_000
    found = re.match(r"const CHARTS = (.*);\n", charts)
    assert found is not None
    specs = json.loads(found[1])
    places = [attrs["id"] for tag, attrs in whole.elements if attrs.get("class") == "chart"]
    assert list(specs) == places
    assert len(specs) == len(specs_of(report_of())) == 15


def test_the_header_says_what_of_where_and_when(whole: _Text) -> None:
    text = " ".join(" ".join(whole.texts).split())
    for part in ("Watersmeet: shop", "2026-01-01 10:00:00.000Z", "/lakes/shop", "tracking, orders", "1,234", "30m"):
        assert part in text
    assert "0 2025-12-31 10:00:00.000Z 1,000 2 3 4 5 6 1 - 0 0 0 0 0 0" in text


def test_what_comes_out_of_the_lake_is_text_and_nothing_else() -> None:
    nasty = report_of(
        name=NASTY, place=NASTY, sources=(NASTY, "orders"), refused=[Refused(NASTY, NASTY, 1)], wall=None, arrivals=None
    )
    found = _Text(page(nasty))
    assert "".join(found.texts).count(NASTY) >= 4  # title, heading, lake and sources
    assert [tag for tag, _ in found.elements].count("script") == 2
    assert len(found.scripts) == 2
    assert json.dumps(NASTY)[1:-1].replace("<", "\\u003c") in found.scripts[1]


def test_a_name_is_never_part_of_an_expression_or_of_a_fields_name() -> None:
    name = "odd_source_name"
    renamed = report_of(sources=(name, "orders"), refused=[Refused(name, name, 1)], wall=None, arrivals=None)
    for spec in specs_of(renamed).values():
        without_data = {key: value for key, value in spec.items() if key != "datasets"}
        for encoding in encodings(without_data):
            assert name not in json.dumps([channel.get("field") for channel in encoding.values() if isinstance(channel, dict)])
        assert name not in json.dumps([step.get("calculate") for step in without_data.get("transform", [])])


def test_an_empty_lake_has_sentences_where_the_charts_would_be() -> None:
    found = _Text(page(empty()))
    assert not [attrs for _, attrs in found.elements if attrs.get("class") == "chart"]
    text = " ".join(found.texts)
    for sentence in (
        "The lake has no record yet.",
        "none yet",
        "Silver has not merged anything yet.",
        "Bronze has no record yet.",
        "Silver has no merge record yet.",
        "No record came late, and none was quarantined.",
        "No merge record has timed out yet.",
    ):
        assert sentence in text


def test_each_figure_without_data_says_so() -> None:
    wall = report_of().wall
    assert wall is not None
    nothing: dict[str, Any] = {name: [] for name in wall._fields[2:]}
    found = sections(report_of(wall=wall._replace(**nothing), events=EventTime(EVENT, None, [], EVENT, [])))
    bare = [figure for section in found for figure in section.figures if figure.draw is None]
    assert len(bare) == 9 + 2
    assert all(figure.caption.endswith(".") for figure in bare)


def test_partitions_that_are_not_shown_are_told_of() -> None:
    counts = [PartitionCounts(p, NOW - p) for p in range(20)]
    shown = furthest_behind(counts)
    assert shown == list(range(12, 20))
    captions = [f.caption for section in sections(report_of(partitions=counts, shown=shown)) for f in section.figures]
    assert sum("Shown are 8 of 20 partitions" in caption for caption in captions) == 3


def test_a_partition_without_a_clock_is_not_the_furthest_behind() -> None:
    counts = [PartitionCounts(0, None), PartitionCounts(1, 5), PartitionCounts(2, None), PartitionCounts(3, 4)]
    assert furthest_behind(counts, 3) == [0, 1, 3]


# -- the charts


def test_an_axis_has_one_kind_of_time() -> None:
    expected = {"Wall time": "wall time (UTC)", "Kafka's timestamps": "Kafka's timestamp (UTC)", "Event time": "event time (UTC)"}
    for section in sections(report_of()):
        for figure in section.figures:
            assert figure.draw is not None
            titles = [e["x"]["axis"]["title"] for e in encodings(figure.draw()) if e.get("x", {}).get("type") == "temporal"]
            assert bool(titles) == (section.title in expected)
            assert all(title.startswith(expected[section.title]) for title in titles)


def test_every_time_axis_is_in_utc_and_the_same_in_a_section() -> None:
    for section in sections(report_of()):
        domains = set()
        for figure in section.figures:
            assert figure.draw is not None
            for encoding in encodings(figure.draw()):
                for channel in ("x", "y"):
                    if encoding.get(channel, {}).get("type") == "temporal":
                        assert encoding[channel]["scale"]["type"] == "utc"
                times = encoding.get("x", {})
                if times.get("type") == "temporal":
                    domains.add((*times["scale"]["domain"], encoding.get("y", {}).get("axis", {}).get("minExtent")))
        assert len({(first, end) for first, end, _ in domains}) <= 1


def test_a_lead_holds_to_the_end() -> None:
    leads = [LeadIn("a", 0, NOW, 60_000), LeadIn("a", 0, NOW + 1000, 120_000)]
    rows = rows_of(lead_chart(leads, ["a", "b"], TimeAxis.over("wall time", WALL)))
    assert [(row["at"] - NOW, row["lead"], row["text"]) for row in rows] == [
        (0, 1.0, "1m"),
        (1000, 2.0, "2m"),
        (4000, 2.0, "2m"),
    ]


def test_a_rate_is_per_second_and_lasts_to_the_end_of_its_step() -> None:
    steps = Steps(NOW, 10_000, 2)
    counts = [CountIn("a", NOW, 50), CountIn("a", NOW + 10_000, 5)]
    rows = rows_of(rate_chart(counts, ["a"], steps, TimeAxis.over("wall time", steps), "records a second"))
    assert [(row["at"] - NOW, row["rate"]) for row in rows] == [(0, 5.0), (10_000, 0.5), (20_000, 0.5)]


def test_delays_have_the_largest_unit_that_fits() -> None:
    delays = [DelayIn("a", NOW, -1000, 500, 90_000)]
    spec = delay_chart(delays, ["a"], WALL, TimeAxis.over("wall time", WALL))
    [row] = rows_of(spec)
    assert (row["least"], row["most"], row["text"]) == (-1 / 60, 1.5, "-1s / 500ms / 1m 30s")
    assert {e["y"]["axis"]["title"] for e in encodings(spec) if "y" in e} == {"minutes"}


@pytest.mark.parametrize(
    ("longest", "unit"),
    [(0, "milliseconds"), (999, "milliseconds"), (1000, "seconds"), (HOUR - 1, "minutes"), (HOUR, "hours"), (9 * DAY, "days")],
)
def test_a_unit_is_filled(longest: int, unit: str) -> None:
    assert unit_for(longest)[0] == unit


def test_a_step_without_merge_records_is_a_gap_and_no_zero() -> None:
    matched = [MatchedIn(EVENT.first, 4, (4, 1), 1), MatchedIn(EVENT.first + 2 * HOUR, 2, (0, 2), 0)]
    rows = rows_of(match_chart(matched, ["a", "b"], EVENT, TimeAxis.over("event time", EVENT)))
    shares = {name: [row["share"] for row in rows if row["of"] == name] for name in ("a", "b", "all sources")}
    assert shares == {"a": [1.0, None, 0.0], "b": [0.25, None, 1.0], "all sources": [0.25, None, 0.0]}


def test_the_smallest_clock_is_marked_where_it_is_on_the_axis() -> None:
    axis = TimeAxis.over("event time", EVENT)
    rules = [len(open_chart([OpenIn(EVENT.first, 1)], clock, EVENT, axis).get("layer", [])) for clock in (axis.end, 0, None)]
    assert rules == [2, 0, 0]


def test_a_clock_that_is_lost_breaks_the_line() -> None:
    clocks = [ClockAt(0, NOW, 5), ClockAt(0, NOW + 1000, None), ClockAt(0, NOW + 2000, 7)]
    rows = rows_of(clock_chart(clocks, TimeAxis.over("wall time", WALL)))
    assert [row["clock"] for row in rows] == [5, None, 7]


def test_no_two_of_eight_colours_are_the_same() -> None:
    assert len(set(COLOURS)) == 8


# -- steps of time


@pytest.mark.parametrize(
    ("first", "last"), [(0, 0), (0, 1), (7, 246), (7, 247), (NOW, NOW + 61_000), (NOW, NOW + 400 * DAY), (0, YEAR_9999)]
)
@pytest.mark.parametrize("most", [40, 120, 240])
def test_steps_are_as_narrow_as_so_many_can_be(first: int, last: int, most: int) -> None:
    steps = steps_over(first, last, most)
    if steps.width < WIDTHS[-1]:
        assert steps.number <= most
    assert steps.number <= max(most, 81)
    assert steps.first % steps.width == 0
    assert steps.first <= first < steps.first + steps.width
    assert steps.end - steps.width <= last < steps.end
    narrower = [width for width in WIDTHS if width < steps.width]
    assert all((last - last % width - (first - first % width)) // width + 1 > most for width in narrower[-1:])


def test_steps_are_no_narrower_than_is_asked() -> None:
    assert steps_over(0, 10, 100, narrowest=1000) == Steps(0, 1000, 1)


def test_every_step_has_a_number() -> None:
    assert in_each(Steps(10, 5, 3), {15: 2, 99: 7}) == [(10, 0), (15, 2), (20, 0)]


def test_the_format_of_a_time_tells_its_ticks_apart() -> None:
    widths = (5, 60_000, HOUR, 3 * DAY, 30 * DAY)
    formats = [time_format(NOW, NOW + width) for width in widths]
    assert formats == ["%H:%M:%S.%L", "%H:%M:%S", "%H:%M", "%m-%d %H:%M", "%Y-%m-%d"]


# -- the file


def test_where_no_page_can_be_written_is_said_in_one_sentence(tmp_path: Path) -> None:
    for out, words in (
        (tmp_path / "missing" / "page.html", "there is no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "page.html", "there is no folder"),
    ):
        (tmp_path / "file").write_text("", encoding="utf-8")
        with pytest.raises(ConfigurationError, match=words) as refused:
            check_writable(out)
        assert str(out) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_folder_that_is_not_ones_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be allowed everything
    with pytest.raises(ConfigurationError, match="no permission"):
        check_writable(tmp_path / "page.html")


def test_what_fails_in_the_end_is_a_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_page(tmp_path, "")


def test_a_page_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for text in ("old", "é"):
        check_writable(out)
        write_page(out, text)
    assert out.read_text(encoding="utf-8") == "é"
