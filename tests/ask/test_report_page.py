"""The report's page: it holds what it is told as text, needs nothing else, and mixes no two kinds
of time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from tests.support.report_tables import river_of, settings_for, write_tables
from watersmeet.ask.charts import (
    COLOURS,
    WIDTHS,
    Figure,
    Steps,
    colour,
    extended,
    in_unit,
    significant,
    time_format,
)
from watersmeet.ask.page import LONGEST_LABEL, Sentence, check_writable, write_page
from watersmeet.ask.report import Report, Section, read_report
from watersmeet.ask.report_page import page
from watersmeet.errors import ConfigurationError
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake

HOUR, DAY = 3_600_000, 86_400_000
NOW = 1_769_940_000_000
"""2026-02-01 10:00 UTC."""

YEAR_9999 = 253_402_300_799_999
NASTY = "</script><script>alert(1)</script>&\"'"


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
def river(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A report with something in every figure."""
    settings = settings_for(
        tmp_path_factory.mktemp("river"), ("tracking", "odd_source_name"), timeout="30m"
    )
    write_tables(settings, river_of(settings, batches=200))
    return read_report(DeltaRsReader(Lake(settings)), settings, NOW)


@pytest.fixture(scope="module")
def whole(river: Report) -> _Text:
    return _Text(page(river))


def charts_of(*sections: Section) -> list[Any]:
    return [figure.chart for section in sections for figure in section.figures if figure.chart]


def encodings(spec: Any) -> Iterator[dict[str, Any]]:
    """Every encoding in a specification, however deep."""
    for inner in (
        spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ()
    ):
        yield from encodings(inner)
    if isinstance(spec, dict) and "encoding" in spec:
        yield spec["encoding"]


# -- the page


def test_nothing_is_loaded(whole: _Text) -> None:
    attributes = {name for _, attrs in whole.elements for name in attrs}
    assert attributes.isdisjoint({"src", "href", "srcset", "data", "action"})
    assert {tag for tag, _ in whole.elements}.isdisjoint(
        {"link", "iframe", "object", "embed", "base", "img"}
    )
    [policy] = [
        attrs["content"] or ""
        for tag, attrs in whole.elements
        if tag == "meta" and "http-equiv" in attrs
    ]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "connect-src" not in policy
    style = "".join(whole.texts)
    assert "@import" not in style
    assert "url(" not in style


def test_the_library_is_in_it_once_and_every_chart_has_its_place(
    river: Report, whole: _Text
) -> None:
    library, drawing = whole.scripts
    assert 500_000 < len(library) < 1_500_000
    found = re.match(r"const CHARTS = (.*);\n", drawing)
    assert found is not None
    specs = json.loads(found[1])
    assert list(specs) == [
        attrs["id"] for _, attrs in whole.elements if attrs.get("class") == "chart"
    ]
    assert list(specs.values()) == charts_of(*river.sections)


def test_every_figure_of_a_lake_is_on_its_page(river: Report, whole: _Text) -> None:
    figures = [figure for section in river.sections for figure in section.figures]
    assert len(figures) == 14
    for figure in figures:
        assert figure.rows
        assert figure.title in whole.texts
        assert figure.caption in whole.texts
        assert figure.caption.endswith(".")
    text = " ".join(" ".join(whole.texts).split())
    for part in (
        "Watersmeet: shop",
        "2026-02-01 10:00:00.000Z",
        "tracking, odd_source_name",
        "199, committed at",
        "30m",
    ):
        assert part in text


def test_a_figure_without_a_chart_is_a_table_and_one_without_rows_a_sentence() -> None:
    rows = [{"partition": "1000", "records": 1000}]
    found = _Text(
        page(
            Report(
                "shop",
                {},
                [Section("", "", [Figure("one", "A.", rows), Figure("other", "None yet.", [])])],
            )
        )
    )
    assert " ".join(" ".join(found.texts).split()).endswith(
        "partition records 1000 1,000 A. other None yet."
    )
    assert [tag for tag, _ in found.elements].count("table") == 1


def test_backquotes_are_code_in_the_programs_own_sentences_and_stay_in_what_the_lake_has() -> None:
    rows = [{"tenant": "shop `of` <b>", "what helps": Sentence("name it (`sources.<b>.key`)")}]
    html = page(Report("shop", {}, [Section("", "", [Figure("", "As `status` says it.", rows)])]))
    assert "<td>shop `of` &lt;b&gt;</td>" in html
    assert "name it (<code>sources.&lt;b&gt;.key</code>)</td>" in html
    assert "As <code>status</code> says it." in html


def test_a_column_with_a_long_text_has_all_of_its_texts_at_the_left() -> None:
    rows = [{"tenant": text, "open": 1} for text in ("acme", "x" * (LONGEST_LABEL + 1), "Zürich")]
    html = page(Report("shop", {}, [Section("", "", [Figure("", "A.", rows)])]))
    assert html.count('<td class="prose">') == 3
    assert '<th class="prose">tenant</th><th>open</th>' in html


def test_what_comes_out_of_the_lake_is_text_and_nothing_else(river: Report) -> None:
    chart = charts_of(*river.sections)[0] | {"data": {"values": [{"of": NASTY}]}}
    figures = [Figure(NASTY, NASTY, [{"reason": NASTY}]), Figure("", "", [{"of": NASTY}], chart)]
    found = _Text(page(Report(NASTY, {"lake": NASTY}, [Section("", "", figures)])))
    # Title, heading, lake, and the figure's title, caption and cell.
    assert "".join(found.texts).count(NASTY) == 6
    assert len(found.scripts) == [tag for tag, _ in found.elements].count("script") == 2
    assert json.dumps(NASTY)[1:-1].replace("<", "\\u003c") in found.scripts[1]


def test_a_name_is_never_part_of_an_expression_or_of_a_fields_name(river: Report) -> None:
    for encoding in encodings(charts_of(*river.sections)):
        for channel in encoding.values():
            assert "odd_source_name" not in json.dumps(
                [channel.get("field"), channel.get("axis"), channel.get("condition")]
            )


# -- the charts


WIDEST_ON_A_PHONE = 28
"""Characters of an axis's title that fit below a chart on a screen of 390 pixels."""


def test_every_axis_says_what_it_shows(river: Report) -> None:
    for encoding in encodings(charts_of(*river.sections)):
        for axis in {"x", "y"} & set(encoding):
            assert encoding[axis].get("title") not in (None, "", "up to")


def test_every_chart_is_drawn_by_the_library(river: Report) -> None:
    for chart in charts_of(*river.sections):
        assert vl_convert.vegalite_to_svg({**chart, "width": 600}).count("<path") > 3


def test_an_axis_has_one_kind_of_time_the_same_in_a_section_and_in_utc(river: Report) -> None:
    expected = {
        "Wall time": "wall time (UTC)",
        "Kafka's timestamps": "Kafka's timestamp (UTC)",
        "Event time": "event time (UTC)",
    }
    for section in river.sections:
        found = [
            encoding["x"]
            for encoding in encodings(charts_of(section))
            if encoding["x"].get("type") == "temporal"
        ]
        assert bool(found) == (section.title in expected)
        assert all(x["title"][0] == expected[section.title] for x in found)
        assert all(len(line) <= WIDEST_ON_A_PHONE for x in found for line in x["title"])
        ends = {tuple(x["scale"]["domain"]) for x in found}
        assert len(ends) <= 1 + (section.title == "Event time")  # whose charts end where data does
    channels = [
        channel
        for encoding in encodings(charts_of(*river.sections))
        for channel in encoding.values()
    ]
    assert {
        channel["scale"]["type"] for channel in channels if channel.get("type") == "temporal"
    } == {"utc"}


def test_each_of_several_lines_that_lie_on_each_other_is_seen(river: Report) -> None:
    several = [
        encoding
        for chart in charts_of(*river.sections)
        for layer in chart["layer"]
        if layer["mark"]["type"] == "line"
        for encoding in [layer["encoding"]]
        if len(encoding["color"]["scale"]["domain"]) > 1
    ]
    assert len(several) == 4
    for encoding in several:
        width = encoding["strokeWidth"]["scale"]
        assert width["domain"] == encoding["color"]["scale"]["domain"]
        assert all(wider - width >= 1 for wider, width in pairwise(width["range"]))
        names = width["domain"]
        values = [{"of": of, "partition": of, "x": x} for of in names for x in (1, 2)]
        channels = {name: encoding[name] for name in ("color", "strokeWidth")}
        channels["x"] = {"field": "x", "type": "quantitative"}
        chart = {"data": {"values": values}, "mark": "line", "encoding": channels}
        svg = vl_convert.vegalite_to_svg(chart)
        assert all(f'stroke-width="{size:g}"' in svg for size in width["range"])


def test_no_corner_of_a_wide_line_goes_beyond_what_it_says(river: Report) -> None:
    drawn_lines = [
        layer["mark"]
        for chart in charts_of(*river.sections)
        for layer in chart["layer"]
        if layer["mark"]["type"] == "line"
    ]
    assert len(drawn_lines) == 4
    assert {mark["strokeJoin"] for mark in drawn_lines} == {"round"}


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, 0.0), (1 / 10_800, 9.259e-05), (1234.56, 1235.0), (2 - 1e-16, 2.0)]
)
def test_a_number_is_cut_to_the_digits_that_count(value: float, shown: float) -> None:
    assert significant(value) == shown


def test_a_row_holds_to_the_end() -> None:
    rows = [{"of": of, "at": at, "n": n} for of, at, n in [("a", 1, 5), ("a", 2, 6), ("b", 1, 7)]]
    assert extended(rows, "of", 9) == [
        *rows,
        {"of": "a", "at": 9, "n": 6},
        {"of": "b", "at": 9, "n": 7},
    ]
    assert extended([], "of", 9) == []


@pytest.mark.parametrize(
    ("longest", "unit", "expected"),
    [
        *(
            (0, "milliseconds", 0),
            (999, "milliseconds", 999),
            (-1000, "seconds", -1),
            (HOUR - 1, "minutes", 60),
        ),
        *((HOUR, "hours", 1), (9 * DAY, "days", 9)),
    ],
)
def test_a_unit_is_filled_by_the_longest_duration(longest: int, unit: str, expected: float) -> None:
    rows, found = in_unit([{"least": 0, "most": longest}], "least", "most")
    assert (rows, found) == ([{"least": 0, "most": expected}], unit)


def test_no_two_of_eight_colours_are_the_same() -> None:
    eight: Any = colour(range(8)).to_dict()
    one: Any = colour(range(1)).to_dict()
    assert len(set(COLOURS)) == len(set(eight["scale"]["range"])) == 8
    assert one["legend"] is None


# -- steps of time


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (0, 0),
        (0, 1),
        (7, 246),
        (7, 247),
        (NOW, NOW + 61_000),
        (NOW, NOW + 400 * DAY),
        (0, YEAR_9999),
    ],
)
@pytest.mark.parametrize("most", [40, 120, 240])
def test_steps_are_as_narrow_as_their_number_allows(first: int, last: int, most: int) -> None:
    steps = Steps.over([last, first], most)
    if steps.width < WIDTHS[-1]:
        assert len(steps.starts) <= most
    assert len(steps.starts) <= max(most, 81)
    assert steps.first % steps.width == 0
    assert steps.first <= first < steps.first + steps.width
    assert steps.end - steps.width <= last < steps.end
    narrower = [width for width in WIDTHS if width < steps.width]
    assert all(
        (last - last % width - (first - first % width)) // width + 1 > most
        for width in narrower[-1:]
    )


def test_steps_are_no_narrower_than_is_asked() -> None:
    assert Steps.over([0, 10], 100, narrowest=1000) == Steps(0, 1000, 1000)


def test_the_format_of_a_time_tells_its_ticks_apart() -> None:
    widths = (5, 60_000, HOUR, 3 * DAY, 30 * DAY)
    formats = [time_format(NOW, NOW + width) for width in widths]
    assert formats == ["%H:%M:%S.%L", "%H:%M:%S", "%H:%M", "%m-%d %H:%M", "%Y-%m-%d"]


# -- the file


def test_where_no_page_can_be_written_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path / "missing" / "page.html", tmp_path, tmp_path / "file" / "page.html"):
        with pytest.raises(ConfigurationError) as refused:
            check_writable("--out", out)
        assert str(out) in str(refused.value)
        assert "\n" not in str(refused.value)
    # Whoever runs the tests may be allowed everything.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigurationError):
        check_writable("--out", tmp_path / "page.html")


def test_a_page_that_cannot_be_written_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_page("--out", tmp_path, "")


def test_a_page_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for text in ("old", "é"):
        check_writable("--out", out)
        write_page("--out", out, text)
    assert out.read_text(encoding="utf-8") == "é"
