"""docs/analysts.md stays true: its columns are the tables', its queries run, and its example comes
out as it says. And the glossary is in order.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.support.effort import first_then_nightly
from tests.support.inputs import tp_of
from tests.support.journals import decisions_of, journal_rows
from tests.support.lakes import as_published, engine_for, fill_bronze, quickly
from tests.unit.test_docs import REGISTRY, ROOT, prose, slug
from watersmeet.core.types import ddl
from watersmeet.dev.init import write_example
from watersmeet.lake import tables
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.history import Generation
from watersmeet.run import create_missing
from watersmeet.running.bronze_table import BronzeTable
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings, load_settings
from watersmeet.silver import Silver

pytestmark = [pytest.mark.long, pytest.mark.promise("A11")]

PAGE = (ROOT / "docs" / "analysts.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

PIECE = re.compile(
    r"^<details><summary>(?P<engines>.*?)</summary>$|^```sql\n(?P<sql>.*?)^```$"
    r"|^```\n(?P<shown>\+-.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
OTHERS = ("DuckDB", "Polars")
SECTION = re.compile(r"^### `([^`]+)`\n\n(.*?)(?=^#|\Z)", re.DOTALL | re.MULTILINE)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split(" | ")]


class Example:
    """The lake of the page's example, in a folder as `make demo` leaves it, and a session with what
    the page defines."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.folder = folder
        write_example(folder / "demo-lake")
        self.settings: Settings = quickly(
            load_settings(folder / "demo-lake" / "watersmeet.yml", {})
        )
        self.spark, self.engine = spark, engine_for(lambda: spark, self.settings)
        create_missing(self.engine)
        begin = {tp_of(source, 0): 0 for source in self.settings.sources}
        first = Generation(0, 0, begin, {}, decided_at=1_767_261_600_000, reason="start: earliest")
        rows = journal_rows(decisions_of([first]))
        self.engine.append(tables.JOURNAL, rows)
        rows = [
            cells(line)
            for line in PAGE.splitlines()
            if re.match(r"\| \d \| `(tracking|orders)` \|", line)
        ]
        for step in sorted({row[0] for row in rows}):
            self._arrive([row for row in rows if row[0] == step])
            list(Silver(Owner(self.engine), self.settings, 1).drain())
        # What gold would have noted, had it published the two records that have timed out.
        reader, layout = self.engine.reader, self.engine.lake.layout
        noted = as_published(reader, layout, "merged (a.b)", 1_767_265_300_000)
        self.engine.append(tables.PUBLISHED, noted)

    def _arrive(self, rows: list[list[str]]) -> None:
        for source in self.settings.sources:
            mine = {
                (0, int(row[2])): row[3].strip("`").encode()
                for row in rows
                if row[1] == f"`{source}`"
            }
            fill_bronze(
                BronzeTable(
                    Owner(self.engine), self.settings, self.settings.inputs_by_name[source]
                ),
                dict(mine),
            )

    def names(self) -> dict[str, Any]:
        """What the page's Python defines."""
        found: dict[str, Any] = {}
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
                exec(block, found)
            for version in (1, 2, 3):
                name = f"silver_{version}"
                found["load"]("demo-lake/lake/silver", name, version=version)
                silver = polars.scan_delta("demo-lake/lake/silver", version=version)
                found["lake"].register(name, silver)
        finally:
            os.chdir(before)
        return found

    def query(self, spark: SparkSession, statement: str) -> DataFrame:
        # Time travel goes by the time that Spark's history shows.
        history = SparkReader(self.engine.lake, lambda: self.spark).history(tables.SILVER)
        [first] = [version for version in history if version.number == 1]
        time = datetime.fromtimestamp(first.committed_at_ms / 1000, timezone.utc).isoformat(
            " ", timespec="milliseconds"
        )
        text = statement.replace("LAKE", str(self.settings.lake))
        return spark.sql(re.sub(r"TIMESTAMP AS OF '[^']+'", f"TIMESTAMP AS OF '{time}'", text))


@pytest.fixture(scope="module")
def example(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example(root_session, tmp_path_factory.mktemp("analysts"))


@pytest.fixture(scope="module")
def names(example: Example) -> Iterator[dict[str, Any]]:
    names = example.names()
    yield names
    # The page's tables are in the connection that all tests of a process share.
    for name in (*names["views"], *names["journal_views"]):
        names["duckdb"].sql(f"DROP VIEW {name}")
    for name, *_ in names["duckdb"].sql("SHOW TABLES").fetchall():
        names["duckdb"].sql(f"DROP TABLE {name}")


@dataclass
class Answer:
    """A statement of the page for Spark, what the page shows of its answer, and the statement for
    each other engine, which is the same one where the page has no other."""

    spark: str
    shown: str = ""
    others: dict[str, str] = field(default_factory=dict)

    def of(self, engine: str) -> str | None:
        """The statement for another engine; None where it is for Spark alone."""
        return self.others.get(engine) or (
            None if self.spark.startswith("-- Spark") else self.spark
        )


def answers() -> list[Answer]:
    found: list[Answer] = []
    engines = ""
    for piece in PIECE.finditer(PAGE):
        if piece["engines"]:
            engines = piece["engines"]
        elif piece["shown"]:
            found[-1].shown = piece["shown"]
        elif engines:
            found[-1].others |= {name: piece["sql"] for name in OTHERS if name in engines}
            engines = ""
        else:
            found += [Answer(s.strip()) for s in piece["sql"].split(";\n") if s.strip()]
    return found


ANSWERS = answers()


def shown_by(answer: DataFrame) -> str:
    """What `show(truncate=False)` prints."""
    with redirect_stdout(io.StringIO()) as said:
        answer.show(truncate=False)
    return said.getvalue().strip()


@pytest.mark.nightly
@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_a_query_runs_and_answers_as_the_page_says(
    example: Example, names: dict[str, Any], answer: Answer
) -> None:
    found = example.query(names["spark"], answer.spark)
    if answer.shown:
        assert shown_by(found) == answer.shown.strip()
    else:
        assert found.collect(), "no row of the example is in the answer"


@pytest.mark.parametrize("answer", first_then_nightly(ANSWERS, 8), ids=range(len(ANSWERS)))
def test_duckdb_and_polars_answer_as_spark_does(
    example: Example,
    names: dict[str, Any],
    answer: Answer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(example.folder)
    for engine in OTHERS:
        statement = answer.of(engine)
        if statement is None:
            continue
        if engine == "DuckDB":
            found = names["duckdb"].sql(statement).to_arrow_table().to_pylist()
        else:
            found = names["lake"].execute(statement).collect().to_dicts()
        by_spark = [row.asDict() for row in example.query(names["spark"], answer.spark).collect()]
        assert plain(found, statement) == plain(by_spark, statement)


def plain(rows: list[dict[str, Any]], statement: str) -> list[dict[str, str]]:
    """Values as texts, for engines differ in their types: of numbers, of times, of bytes."""

    def text(value: Any) -> str:
        if isinstance(value, (bytes, bytearray)):
            return value.decode()
        if isinstance(value, datetime):
            return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S.%f}".removesuffix(".000000")
        if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool):
            return f"{value:g}"
        if hasattr(value, "asDict"):
            return text(value.asDict())
        if isinstance(value, dict):
            return str({name: text(inner) for name, inner in value.items()})
        if isinstance(value, list):
            return str([text(inner) for inner in value])
        return str(value)

    texts = [{name: text(value) for name, value in row.items()} for row in rows]
    return texts if "ORDER BY" in statement else sorted(texts, key=str)


def test_answers_are_shown_and_are_for_every_engine() -> None:
    assert sum(bool(answer.shown) for answer in ANSWERS) >= 8
    assert len(ANSWERS) >= 18
    for_spark_alone = [answer.spark for answer in ANSWERS if answer.of("Polars") is None]
    assert len(for_spark_alone) == 3, "time travel by time, the history, the live view"


def test_every_table_is_named(example: Example) -> None:
    at_a_glance = PAGE.partition("## The tables\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"^\| `([^`]+)` \|", at_a_glance, re.MULTILINE)) | {tables.LEASES}
    laid_out = {
        re.sub("^bronze_.*", "bronze_<source>", name) for name in tables.layout(example.settings)
    }
    assert named == laid_out
    assert all(f"`{name}`" in at_a_glance for name in laid_out)


def described_by(text: str) -> list[list[str]]:
    """The rows of the table in a section."""
    return [cells(line) for line in text.splitlines() if line.startswith("| ")][1:]


OF_SILVER = (tables.SILVER, tables.BASES)
SECTIONS = {name: text for name, text in SECTION.findall(PAGE) if name not in OF_SILVER}


@pytest.mark.parametrize("name", SECTIONS)
def test_columns_and_types_are_the_tables(example: Example, name: str) -> None:
    described = [tuple(row[:2]) for row in described_by(SECTIONS[name])]
    schema = example.engine.lake.schema(name.replace("<source>", "tracking"))
    sources = set(example.settings.sources) & set(schema.names)
    stored = [(f"`{f.name}`", f"`{ddl(f.type).lower()}`") for f in schema if f.name not in sources]
    assert [row for row in described if row[0].startswith("`")] == stored
    assert sources or name not in (tables.MERGED, tables.CORRECTIONS)
    if sources:
        place = schema.names.index("tracking")
        assert described[place] == (
            "one for each source, with its name",
            "`array<struct<offset, event_time, value>>`",
        )
        assert set(schema.names[place : place + 2]) == sources


def test_each_status_of_silver_has_its_view(example: Example) -> None:
    rows = described_by(dict(SECTION.findall(PAGE))[tables.SILVER])
    views = {
        name: view.parts[0].where[0][2]
        for name, view in example.engine.lake.views.items()
        if view.parts[0].table == tables.SILVER
    }
    assert [(row[0].strip("`"), row[1].strip("`")) for row in rows] == [
        (status, name)
        for name, of in views.items()
        for status in (of if isinstance(of, list) else [of])
    ]


def test_the_pages_views_are_the_lakes(
    example: Example, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reader answers the same rows."""
    monkeypatch.chdir(example.folder)
    views = example.engine.lake.views
    assert {*names["views"], *names["journal_views"]} == set(views)
    for name, view in views.items():
        columns = [column for column in view.schema.names if column not in ("key", "headers")]
        chosen = ", ".join(f"{name}.{column}" for column in columns)
        found = [
            names["duckdb"].sql(f"SELECT {chosen} FROM {name}").to_arrow_table().to_pylist(),
            names["lake"].execute(f"SELECT {chosen} FROM {name}").collect().to_dicts(),
        ]
        by_spark = [
            row.asDict(recursive=True)
            for row in names["spark"].sql(f"SELECT {chosen} FROM {name}").collect()
        ]
        for rows in found:
            assert plain(rows, name) == plain(by_spark, name), name
        assert len(by_spark) == example.engine.reader.select(name, columns).num_rows
        assert by_spark or name not in ("merged", "late", "progress", "quarantine")


def test_every_table_and_view_has_its_columns(example: Example) -> None:
    described = {name for name, _ in SECTION.findall(PAGE)}
    lake = example.engine.lake
    assert described == {
        re.sub("^bronze_.*", "bronze_<source>", name) for name in (*lake.layout, *lake.views)
    } - {tables.LEASES}


def test_every_view_is_named(example: Example) -> None:
    at_a_glance = PAGE.partition("### The views\n")[2].partition("\n### ")[0]
    assert [row[0].strip("`") for row in described_by(at_a_glance)] == [*example.engine.lake.views]


# -- both pages


@pytest.mark.parametrize("text", [PAGE, GLOSSARY], ids=["analysts", "glossary"])
def test_links_lead_somewhere(text: str) -> None:
    anchors = {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)}
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    assert targets
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("https://"):
            assert (ROOT / "docs" / target.partition("#")[0]).exists(), target
    assert REGISTRY.search(text) is None


def terms() -> list[str]:
    return re.findall(r"^- \*\*([^*]+)\*\*", GLOSSARY, re.MULTILINE)


def test_terms_are_in_alphabetical_order_each_once() -> None:
    plain = [term.replace("`", "").lower() for term in terms()]
    assert plain == sorted(set(plain))
    assert len(plain) > 50


def test_every_term_that_another_refers_to_is_there() -> None:
    known = {term.replace("`", "").lower() for term in terms()}
    referred = re.findall(r"→ \*([^*]+)\*", GLOSSARY)
    assert referred
    assert {term.lower() for term in referred} <= known
