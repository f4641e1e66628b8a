"""docs/analysts.md stays true: its columns are the tables', its queries run, and its example comes
out as it says. And the glossary is in order.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.support.inputs import tp_of
from tests.support.lakes import engine_for, fill_bronze, first_columns, quickly
from tests.unit.test_docs import REGISTRY, ROOT, prose, slug
from watersmeet.dev.init import write_example
from watersmeet.lake import tables
from watersmeet.lake.by_spark import SparkReader, table_rows
from watersmeet.lake.generations import Generation, generation_rows
from watersmeet.run import create_missing
from watersmeet.running.bronze_table import BronzeTable
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings, load_settings
from watersmeet.silver import Silver

pytestmark = [pytest.mark.long, pytest.mark.promise("A11")]

PAGE = (ROOT / "docs" / "analysts.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

QUERY = re.compile(r"^```sql\n(.*?)^```\n(?:\n^```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
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
        self.engine.append(tables.GENERATIONS, generation_rows(self.settings, first))
        rows = [
            cells(line)
            for line in PAGE.splitlines()
            if re.match(r"\| \d \| `(tracking|orders)` \|", line)
        ]
        for step in sorted({row[0] for row in rows}):
            self._arrive([row for row in rows if row[0] == step])
            list(Silver(Owner(self.engine), self.settings, 1).drain())
        # What gold would have noted, had it published the two records that have timed out.
        found = self.engine.reader.select(
            tables.SILVER, ["event_time", "merge_key"], [[("valid", "=", True)]]
        )
        last = max(tuple(row.values()) for row in found.to_pylist())
        published = [(0, 0, 1, *last, 1, 1_767_265_300_000, "merged (a.b)")]
        layout = self.engine.lake.layout[tables.PUBLISHED]
        self.engine.append(tables.PUBLISHED, first_columns(layout, published))

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
def names(example: Example) -> dict[str, Any]:
    return example.names()


def queries() -> list[tuple[str, str]]:
    """Every statement, with what the page shows of its answer."""
    return [
        (s.strip(), shown)
        for block, shown in QUERY.findall(PAGE)
        for s in block.split(";\n")
        if s.strip()
    ]


def shown_by(answer: DataFrame) -> str:
    """What `show(truncate=False)` prints."""
    with redirect_stdout(io.StringIO()) as said:
        answer.show(truncate=False)
    return said.getvalue().strip()


@pytest.mark.nightly
@pytest.mark.parametrize(("statement", "shown"), queries(), ids=range(len(queries())))
def test_a_query_runs_and_answers_as_the_page_says(
    example: Example, names: dict[str, Any], statement: str, shown: str
) -> None:
    answer = example.query(names["spark"], statement)
    if shown:
        assert shown_by(answer) == shown.strip()
    else:
        assert answer.collect(), "no row of the example is in the answer"


def test_answers_are_shown() -> None:
    assert sum(bool(shown) for _, shown in queries()) >= 8
    assert len(queries()) >= 18


def test_every_table_is_named(example: Example) -> None:
    at_a_glance = PAGE.partition("## The tables\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"^\| `([^`]+)` \|", at_a_glance, re.MULTILINE)) | {
        tables.CONFIGURATION,
        tables.LEASES,
    }
    laid_out = {
        re.sub("^bronze_.*", "bronze_<source>", name) for name in tables.layout(example.settings)
    }
    assert named == laid_out
    assert all(f"`{name}`" in at_a_glance for name in laid_out)


@pytest.mark.parametrize(
    ("name", "text"), SECTION.findall(PAGE), ids=[name for name, _ in SECTION.findall(PAGE)]
)
def test_columns_and_types_are_the_tables(example: Example, name: str, text: str) -> None:
    described = [tuple(cells(line)[:2]) for line in text.splitlines() if line.startswith("| ")][1:]
    schema = table_rows(
        example.spark, example.engine.lake, name.replace("<source>", "tracking")
    ).schema
    sources = set(example.settings.sources) if name == tables.SILVER else set()
    stored = [
        (f"`{f.name}`", f"`{f.dataType.simpleString()}`") for f in schema if f.name not in sources
    ]
    assert [row for row in described if row[0].startswith("`")] == stored
    if sources:
        assert described[5] == (
            "one for each source, with its name",
            "`array<struct<offset, event_time, value>>`",
        )
        assert set(schema.names[5:7]) == sources


def test_every_table_but_the_programs_own_has_its_columns(example: Example) -> None:
    described = {name for name, _ in SECTION.findall(PAGE)}
    assert described == {
        re.sub("^bronze_.*", "bronze_<source>", name) for name in tables.layout(example.settings)
    } - {
        tables.CONFIGURATION,
        tables.LEASES,
    }


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
