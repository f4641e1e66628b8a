"""The documentation stays true: what it names exists, what exists is named, and its examples
work."""

from __future__ import annotations

import ast
import json
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer
import yaml
from pydantic import BaseModel

from tests.support.configurations import SMALLEST
from tests.support.fault_points import POINTS
from tests.support.inputs import record_of
from tests.support.matrix import Marks, Test, marked_tests, with_matrix
from tests.support.walkthrough import LINK, linked
from watersmeet.cli import app
from watersmeet.configuration.values import RESERVED_NAMES
from watersmeet.core.dead_letters import NEXT_OFFSETS, OFFSET, PARTITION, REASON, TOPIC, VALUE_BYTES
from watersmeet.core.model import MergeRules, PartitionMerge
from watersmeet.core.reading import KAFKA, ReadingRules, Reason, read_records
from watersmeet.core.repartition import FROM, ORIGIN, POSITIONS
from watersmeet.core.sequence import (
    CORRECTED_IN,
    FORGOTTEN,
    ID,
    IDLE,
    JUMPED,
    LIFE,
    MIN_OFFSETS,
    NO_RECOVERY,
    RULES,
    SEQ,
    SETTLED_AT,
    TENANT,
    VERSION,
    U,
    message_id,
)
from watersmeet.core.sequence import FROM as MADE_FROM
from watersmeet.core.sequence import LATE as LATE_RECORD
from watersmeet.core.times import duration, utc
from watersmeet.core.types import TIME
from watersmeet.dev.init import write_example
from watersmeet.errors import ConfigurationError
from watersmeet.kafka.options import check_options
from watersmeet.kafka.permissions import permissions
from watersmeet.lake import tables
from watersmeet.lake.table_reader import sql_of
from watersmeet.lake.views import views
from watersmeet.monitoring.metrics import STATES
from watersmeet.settings import CatalogLake, Settings, load_settings

pytestmark = pytest.mark.promise("A11")

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [README, *sorted(DOCS.glob("*.md"))]
"""What is written for users: commands, configurations and paths in them are tried."""
DOCUMENTS = [*PAGES, ROOT / "CHANGELOG.md", *DECISIONS]
HISTORY = "## History"
"""What follows this heading tells of an earlier state, and names what no longer exists."""
LONGEST_README = 200
FOLDERS = ("pipelines", "tests", "docs", "schemas", "notebooks", "resources", "benchmarks", "bin")
"""A path in backticks that begins with one of these is a path of the repository."""

REGISTRY = re.compile(
    r"[\w.-]*(maven|pypi|pythonhosted|npmjs|artifactory|nexus|jfrog)[\w-]*(\.[\w-]+)+",
    re.IGNORECASE,
)


# -- parts of a document


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition(f"\n{HISTORY}")[0]


def page(name: str, heading: str | None = None) -> str:
    """A page of `docs/`, or the part of it under one of its headings."""
    text = text_of(DOCS / name)
    if heading is None:
        return text
    found = re.search(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"{name} has no section {heading}"
    return found[1]


def blocks(text: str, kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for its_kind, block in found if its_kind == kind]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(text))


def rows(text: str) -> list[list[str]]:
    """The cells of every table's rows, without the headings."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", prose(text), re.MULTILINE):
        found += [re.split(r"\s+\|\s+", line.strip("| ")) for line in table.splitlines()[2:]]
    return found


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


# -- paths and links


def anchors(document: Path) -> set[str]:
    return {
        slug(heading)
        for heading in re.findall(
            r"^#+ (.+)$", prose(document.read_text(encoding="utf-8")), re.MULTILINE
        )
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_path_leads_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        other = document.parent / place if place else document
        assert other.exists(), target
        is_line = other.suffix == ".py"
        assert not anchor or is_line or anchor in anchors(other), target
    for path in (span for span in spans(text) if re.match(rf"({'|'.join(FOLDERS)})/", span)):
        assert (ROOT / path.partition("::")[0]).exists(), path


def test_every_file_at_the_top_that_is_named_exists() -> None:
    for name in (
        "requirements.txt",
        "pipelines/watersmeet/jvm/ivy.xml",
        "databricks.yml",
        "LICENSE",
        "CHANGELOG.md",
    ):
        assert name in README.read_text(encoding="utf-8")
        assert (ROOT / name).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_registry_is_named_by_its_host(document: Path) -> None:
    assert REGISTRY.search(document.read_text(encoding="utf-8")) is None


@pytest.mark.parametrize(
    ("text", "names_one"), [("repo.maven.example.org", True), ("Maven, or PyPI.", False)]
)
def test_a_registrys_host_is_noticed(text: str, names_one: bool) -> None:
    assert (REGISTRY.search(text) is not None) == names_one


def test_the_readme_is_short_and_names_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_README
    assert set(re.findall(r"\]\(docs/([\w-]+\.md)\)", text)) == {
        path.name for path in DOCS.glob("*.md")
    }


def test_decisions_are_numbered_and_short() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for path in DECISIONS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith(f"# {int(path.name[:4])}. "), path.name
        assert [line for line in lines if line.startswith("## ")] == [
            "## Context",
            "## Decision",
            "## Consequences",
        ], path.name
        assert len(lines) < 40, path.name


def test_a_superseded_decision_names_a_later_one_under_its_title() -> None:
    superseded = [
        (path, line)
        for path in DECISIONS
        for line in path.read_text(encoding="utf-8").splitlines()[2:3]
        if line[:1] != "#"
    ]
    assert len(superseded) >= 8
    for path, line in superseded:
        found = re.match(
            r"Superseded (?:in part )?by \[decision (\d+)\]\((\d{4})-[\w-]+\.md\)", line
        )
        assert found is not None, path.name
        assert int(found[1]) == int(found[2]) > int(path.name[:4])


# -- commands


def commands(command: Any = None, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words after `watersmeet`."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
        return
    for name, child in inner.items():
        yield from commands(child, *path, name)


COMMANDS = dict(commands())


def test_every_command_has_a_row() -> None:
    named = [
        re.sub(r" (\[|--|[A-Z]).*", "", row[0].strip("`"))
        for row in rows(page("commands.md"))
        if "watersmeet" in row[0]
    ]
    assert named == [f"watersmeet {name}" for name in COMMANDS]


def command_lines() -> list[str]:
    """What is to be typed, or named: everything after `watersmeet`."""
    lines = [
        line.partition(" #")[0].strip()
        for path in PAGES
        for block in blocks(text_of(path), "bash")
        for line in block.splitlines()
    ]
    typed = [line for line in lines if re.match(r"(\.venv/bin/)?watersmeet ", line)]
    named = [
        span for path in PAGES for span in spans(text_of(path)) if span.startswith("watersmeet ")
    ]
    return sorted({re.sub(r" \[.*", "", line.partition(" ")[2]) for line in typed + named})


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_is_one_that_is_taken(line: str) -> None:
    group: Any = typer.main.get_command(app)
    words = shlex.split(line)
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        assert line.startswith("--"), f"no command: {line}"
        assert line in [option for parameter in group.params for option in parameter.opts]
    else:
        COMMANDS[name].make_context(name, words[len(name.split()) :])


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    texts = [
        text for path in PAGES for text in (*blocks(text_of(path), "bash"), *spans(text_of(path)))
    ]
    named = {match for text in texts for match in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)}
    assert {"install", "demo", "check", "test", "bench"} <= named <= targets


# -- configuration


def fields(part: type[BaseModel], *path: str) -> Iterator[str]:
    """Every field that can be written in YAML, dotted; a source's under `tracking`."""
    for attribute, field in part.model_fields.items():
        here = (*path, str(field.validation_alias or attribute))
        yield ".".join(here)
        for inner in parts_in(field.annotation):
            yield from fields(
                inner, *here, *(["tracking"] if typing.get_origin(field.annotation) is dict else [])
            )


def parts_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from parts_in(argument)


def path_in(cell: str) -> str:
    return cell.strip("`").replace("sources.NAME", "sources.tracking")


CONFIGURATION = rows(page("configuration.md", "Fields"))
FIELDS = [(path_in(row[0]), row[1]) for row in CONFIGURATION if len(row) == 3]


def load(folder: Path, config: dict[str, Any]) -> Settings:
    file = folder / "watersmeet.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return load_settings(file, {})


def with_value(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of the configuration with another value at a dotted path."""
    first, _, rest = path.partition(".")
    inner = config.get(first)
    below = with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value
    return {**config, first: below}


def with_registry(folder: Path) -> dict[str, Any]:
    """The smallest configuration whose first source has a schema registry."""
    fields = [{"name": "ts", "type": "long"}]
    (folder / "x.avsc").write_text(
        json.dumps({"type": "record", "name": "R", "fields": fields}), encoding="utf-8"
    )
    config = with_value(SMALLEST, "sources.tracking.registry", {"url": "http://h"})
    return with_value(
        with_value(config, "sources.tracking.format", "avro"), "sources.tracking.schema", "x.avsc"
    )


COMPLETE = {
    "lake": {"catalog": "main", "schema": "shop"},
    "metrics": {"port": 9464},
    "publish.corrections": {"topic": "merged-corrections", "within": "7d"},
    "merge.window": {"gap": "30m", "max": "12h"},
    "sources.tracking.where": {"field": "type", "equals": 1},
    "sources.tracking.heartbeat": {"field": "type", "equals": 1},
    "sources.tracking.key": {"first_of": ["a", "b"]},
    "sources.tracking.event_time": {"field": "ts", "unit": "s"},
    "sources.tracking.event_time.field": {"first_of": ["a", "b"]},
    "sources.tracking.repartition": {"from": "raw", "partitions": 2},
}
"""Values of the parts that the smallest configuration has not, with what they require."""


FORMS = {
    "sources.tracking.key.header": {"header": "h"},
    "sources.tracking.event_time.first_of": {"first_of": ["a", "b"]},
    "sources.tracking.event_time.kafka": {"kafka": "timestamp"},
}
"""Fields that tell one form of a mapping from another, so that none of them is ever missing."""


def test_every_field_has_a_row() -> None:
    assert [path for path, _ in FIELDS] == list(dict.fromkeys(fields(Settings)))
    assert {"lake.catalog", "sources.tracking.heartbeat.equals", "merge.timeout"} <= set(
        fields(Settings)
    )
    assert set(fields(CatalogLake, "lake")) <= set(fields(Settings))


@pytest.mark.parametrize(("path", "default"), FIELDS, ids=[path for path, _ in FIELDS])
def test_the_default_is_the_one_that_is_named(tmp_path: Path, path: str, default: str) -> None:
    if path in FORMS:
        load(tmp_path, with_value(SMALLEST, path.rpartition(".")[0], FORMS[path]))
    elif default == "required":
        parent = path.rpartition(".")[0]
        if parent.endswith(".registry"):
            without = with_registry(tmp_path)
        elif parent in COMPLETE:
            without = with_value(SMALLEST, parent, COMPLETE[parent])
        else:
            without = SMALLEST
        *parents, last = path.split(".")
        part = without = yaml.safe_load(yaml.safe_dump(without))
        for name in parents:
            part = part[name]
        del part[last]
        with pytest.raises(
            ConfigurationError, match=rf"required field `{re.escape(path)}` is missing"
        ):
            load(tmp_path, without)
    else:
        needed = {
            "metrics.address": {"port": 9464},
            "publish.corrections.max_versions": COMPLETE["publish.corrections"],
            "lineage.file": {"url": "http://h"},
            "lineage.url": {"file": "x"},
        }
        needed |= {
            f"sources.tracking.event_time.{name}": {"field": "ts"}
            for name in ("unit", "text", "zone")
        }
        config = (
            with_value(SMALLEST, path.rpartition(".")[0], needed[path])
            if path in needed
            else SMALLEST
        )
        config = with_registry(tmp_path) if ".registry." in path else config
        if path == "merge.timeout":
            config = with_value(SMALLEST, "merge", {"window": {"gap": "30m", "max": "12h"}})
        assert load(tmp_path, with_value(config, path, yaml.safe_load(default.strip("`")))) == load(
            tmp_path, config
        )


def kafka_with(folder: Path, option: str) -> Settings:
    return load(
        folder, with_value(SMALLEST, "kafka", {**SMALLEST["kafka"], "options": {option: "x"}})
    )


def test_every_kafka_option_that_is_named_is_one_of_librdkafkas(tmp_path: Path) -> None:
    [line] = re.findall(
        r"^- `kafka.options` takes (.*?)^- ",
        page("configuration.md", "Kafka options"),
        re.DOTALL | re.MULTILINE,
    )
    for name in spans(line):
        refused = check_options(kafka_with(tmp_path, name).kafka)
        assert not any("No such configuration property" in sentence for sentence in refused), (
            refused
        )
    assert len(spans(line)) >= 5


def test_every_kafka_option_that_is_named_as_set_by_watersmeet_is_refused(tmp_path: Path) -> None:
    [line] = re.findall(
        r"sets it itself: (.*?), and others",
        " ".join(page("configuration.md", "Kafka options").split()),
    )
    for name in spans(line):
        with pytest.raises(ConfigurationError, match="is set by Watersmeet itself"):
            kafka_with(tmp_path, name)
    assert len(spans(line)) >= 8


@pytest.mark.parametrize(
    "text", [block for path in PAGES for block in blocks(text_of(path), "yaml")]
)
def test_every_configuration_that_is_shown_loads(tmp_path: Path, text: str) -> None:
    write_example(tmp_path)
    file = tmp_path / "watersmeet.yml"
    file.write_text(text, encoding="utf-8")
    environment = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "something")
    assert len(load_settings(file, environment).sources) >= 2


def test_a_configuration_is_shown() -> None:
    assert len(blocks(page("configuration.md"), "yaml")) >= 2


# -- Kafka


def test_every_permission_has_a_row() -> None:
    sources = {
        name: {**source, "topic": f"SOURCE-{name}"} for name, source in SMALLEST["sources"].items()
    }
    sources["tracking"]["repartition"] = {"from": "ORIGIN", "partitions": 2}
    publish = {"topic": "SINK", "late_topic": "LETTERS"}
    config = {**SMALLEST, "name": "NAME", "sources": sources, "publish": publish}
    needed = permissions(Settings.model_validate(config, context={"folder": ROOT}))
    described = [
        [cell.strip("`") for cell in row[:3]] + row[3:]
        for row in rows(page("kafka.md", "Permissions"))
    ]
    expected = [[*one[:2], re.sub(r"SOURCE-\w+$", "SOURCE", one.name), one.why] for one in needed]
    assert described == [list(row) for row in dict.fromkeys(map(tuple, expected))]


# -- tables, reasons, headers


TENANTS = {"timeout": "30m", "tenant": "shop", "tenant_max_lag": "24h"}
MERGES = [SMALLEST["merge"], {"window": {"gap": "30m", "max": "12h"}}, TENANTS]


@pytest.mark.parametrize("merge", MERGES, ids=["timeout", "window", "tenants"])
def test_every_table_has_a_row_with_its_columns(tmp_path: Path, merge: dict[str, Any]) -> None:
    """The same ones whatever the merge is; with a registry, for which there is one table more,
    several topics, which parts then name, ids and corrections."""
    settings = with_all(tmp_path, merge)
    described = {row[0].strip("`"): set(spans(row[1])) for row in rows(page("tables.md", "Tables"))}
    sources = list(settings.sources)
    laid_out = {
        name.replace(f"_{sources[0]}", "_<source>"): set(table.schema.names) - set(sources)
        for name, table in tables.layout(settings).items()
        if name != tables.bronze(sources[1])
    }
    assert laid_out[tables.BASES] == {"_base", *laid_out[tables.SILVER]}
    laid_out[tables.BASES] = {"_base", tables.SILVER}
    laid_out[tables.SILVER] |= {"topic", "offset", "event_time", "value"}  # of the parts
    assert described == laid_out


@pytest.mark.parametrize("merge", MERGES, ids=["timeout", "window", "tenants"])
def test_every_view_has_a_row_with_its_columns(tmp_path: Path, merge: dict[str, Any]) -> None:
    settings = with_all(tmp_path, merge)
    described = {row[0].strip("`"): set(spans(row[2])) for row in rows(page("tables.md", "Views"))}
    assert described == {
        name: set(view.schema.names) - set(settings.sources)
        for name, view in views(settings).items()
    }


def test_the_page_for_analysts_has_the_views_as_they_are_declared(tmp_path: Path) -> None:
    """All but those of the journal, which each engine reads in its own way."""
    text = (ROOT / "docs" / "analysts.md").read_text(encoding="utf-8")
    [assigned] = re.findall(r"^(views = \{.*?^\})$", text, re.DOTALL | re.MULTILINE)
    shown = ast.literal_eval(assigned.removeprefix("views = "))
    declared = {}
    for name, view in views(load_settings(write_example(tmp_path)[0])).items():
        selected = []
        for part in view.parts:
            named = (f"{text!r} AS {column}, " for column, text in part.constants.items())
            where = sql_of([part.where], (), "").replace("`", "")
            selected.append(f"SELECT {''.join(named)}* FROM {part.table} WHERE {where}")
        if view.items is None:
            declared[name] = " UNION ALL ".join(selected)
    assert {name: " ".join(view.split()) for name, view in shown.items()} == declared


def with_all(folder: Path, merge: dict[str, Any]) -> Settings:
    """A configuration with this merge, and with all that adds a table or a column."""
    config = with_value(with_registry(folder), "sources.tracking.topic", ["eu", "us"])
    config = with_value(config, "sources.tracking.id", "id")
    config["publish"]["corrections"] = {"topic": "corrections", "within": "7d"}
    return load(folder, with_value(config, "merge", merge))


@pytest.mark.parametrize("merge", MERGES, ids=["timeout", "window", "tenants"])
def test_silvers_columns_are_those_that_no_source_may_be_named_after(
    tmp_path: Path, merge: dict[str, Any]
) -> None:
    reserved = (RESERVED_NAMES - {"key", "seq", "waits_for"}) | set(SMALLEST["sources"])
    config = with_value(with_value(SMALLEST, "merge", merge), "sources.tracking.id", "id")
    silver = tables.layout(load(tmp_path, config))[tables.SILVER]
    assert set(silver.schema.names) == reserved


def test_every_reason_has_a_row_in_order() -> None:
    assert [row[0].strip("`") for row in rows(page("tables.md", "Reading a record"))] == [
        reason.value for reason in Reason
    ]


def test_every_header_is_described() -> None:
    described = re.findall(r"^- \*\*Header\*\* `([^`]+)`", page("messages.md"), re.MULTILINE)
    of_sink, of_corrections, of_letters = (
        [
            SEQ,
            ID,
            TENANT,
            MIN_OFFSETS,
            IDLE,
            RULES,
            MADE_FROM,
            LIFE,
            JUMPED,
            CORRECTED_IN,
            NO_RECOVERY,
        ],
        [VERSION, LATE_RECORD, SETTLED_AT, U, FORGOTTEN],
        [REASON, TOPIC, PARTITION, OFFSET, VALUE_BYTES, NEXT_OFFSETS],
    )
    assert described == [*of_sink, *of_corrections, *of_letters, ORIGIN, FROM, POSITIONS]


def test_every_state_of_a_source_has_a_row() -> None:
    states = [row[0].strip("`") for row in rows(page("commands.md")) if "watersmeet" not in row[0]]
    assert sorted(states) == sorted(STATES)


def test_every_fault_point_has_a_row_in_order() -> None:
    assert [row[0].strip("`") for row in rows(page("commits.md", "Crash points"))] == list(POINTS)


# -- the example to type

FIRST_STEPS = page("first-steps.md")


KAFKA_TIME = 1_790_000_000_000
"""Long after the example's events."""


EXAMPLES = (
    (ROOT / "pipelines" / "watersmeet" / "dev" / "templates" / "examples.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
)
"""What `init` writes to be sent first."""


def example_records() -> list[tuple[str, str]]:
    """Topic and value of what is to be sent, in order."""
    cells = [row for row in rows(FIRST_STEPS) if row[0] in ("`tracking`", "`orders`")]
    return [(row[0].strip("`"), row[1].strip("`")) for row in cells]


def read(folder: Path) -> tuple[MergeRules, list[tuple[str, dict[str, Any]]]]:
    """The example's records as its configuration, which `init` writes, reads them; times in epoch
    ms."""
    write_example(folder)
    settings = load_settings(folder / "watersmeet.yml", {})
    rules = {name: settings.reading_rules(name) for name in settings.sources}
    found = [(topic, read_record(value, rules[topic])) for topic, value in example_records()]
    return MergeRules(settings.inputs, *settings.merge.window), found


def read_record(value: str, rules: ReadingRules) -> dict[str, Any]:
    given = {"partition": [0], "offset": [0], "timestamp_type": [0], "value": [value.encode()]}
    columns = {
        name: pa.array(given.get(name, [None]), kind)
        for name, kind in zip(KAFKA.names, KAFKA.types, strict=True)
    }
    columns["kafka_timestamp"] = pa.array([KAFKA_TIME * 1000], pa.int64()).cast(TIME)
    found = read_records(pa.table(columns, schema=KAFKA), rules)
    times = found["event_time"].cast(pa.int64()).to_pylist()
    row: dict[str, Any] = found.select(["merge_key", "heartbeat", "reason"]).to_pylist()[0]
    return {**row, "event_time": None if times[0] is None else times[0] // 1000}


def merged(rules: MergeRules, readings: list[tuple[str, dict[str, Any]]]) -> PartitionMerge:
    merge, offsets = PartitionMerge(rules), dict.fromkeys(rules.sources, 0)
    for source, reading in readings:
        if reading["event_time"] is not None:
            merge.arrive(
                record_of(source, offsets[source], reading["event_time"], reading["merge_key"])
            )
        offsets[source] += 1
    merge.advance()
    return merge


def test_the_examples_first_records_are_those_of_the_file_that_init_writes() -> None:
    records = [json.loads(line) for line in EXAMPLES]
    assert example_records()[: len(records)] == [
        (record["source"], json.dumps(record["value"], separators=(",", ":"))) for record in records
    ]


def test_the_examples_first_records_stand_as_status_says(tmp_path: Path) -> None:
    rules, readings = read(tmp_path)
    merge = merged(rules, readings[: len(EXAMPLES)])
    [shown] = [block for block in blocks(FIRST_STEPS, "") if block.startswith("partition 0")]
    assert merge.clock is not None
    assert f"clock {utc(merge.clock)}" in shown
    assert f"open {len(merge.open)} · timed out {len(merge.timed_out)} " in shown
    for input_id, head in merge.heads.items():
        source = input_id.source
        [line] = [line.split() for line in shown.splitlines() if line.split()[0] == source]
        waiting = len(merge.unread().get(input_id, ()))
        assert line == [
            source,
            "held" if waiting else "active",
            *utc(head).split(),
            duration(head - merge.clock),
            str(waiting),
        ]


def test_the_example_comes_out_as_it_says(tmp_path: Path) -> None:
    rules, readings = read(tmp_path)
    merge = merged(rules, readings)
    assert [reading["reason"] for _, reading in readings if reading["reason"]] == ["undecodable"]
    values = {
        source: [value for topic, value in example_records() if topic == source]
        for source in rules.sources
    }
    [shown] = [block for block in blocks(FIRST_STEPS, "") if block.startswith("key 7")]
    messages = []
    for seq, row in enumerate(merge.published_order()):
        value = {
            "key": row.key,
            "event_time": row.event_time,
            "last_event_time": row.last_event_time,
        }
        parts = {
            source: [json.loads(values[source][part.offset]) for part in sorted(row.parts[source])]
            for source in row.parts
        }
        text = json.dumps(value | parts, separators=(",", ":"))
        head = (
            f"key {row.key} timestamp {row.event_time} {SEQ} {seq} {ID} "
            f"{message_id(0, row.event_time, row.key)}"
        )
        messages.append((head.split(), text))
    assert merge.open == {}
    assert messages == [
        (head.split(), "".join(line.strip() for line in lines))
        for head, *lines in map(str.splitlines, shown.split("\n\n"))
    ]


# -- the guarantees


def promising_tests() -> dict[Test, Marks]:
    """Every test and every file of tests that names promises, with its marks."""
    marked = marked_tests()
    return {
        test: marks._replace(
            is_nightly=marks.is_nightly or marked.get((test[0], None), marks).is_nightly
        )
        for test, marks in marked.items()
        if marks.promises
    }


def promised_tests() -> dict[str, set[Test]]:
    """By the id of a promise the tests that its row names."""
    found: dict[str, set[Test]] = {}
    for identity, *_, shown_by in (
        row for row in rows(page("guarantees.md")) if re.fullmatch(r"[A-Z]\d+", row[0])
    ):
        assert identity not in found, f"{identity} is two promises"
        path, tests = "", set[Test]()
        for named, test, test_of_same_file in re.findall(
            r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`(test_\w+)`", shown_by
        ):
            path = named or path
            tests.add((path, test or test_of_same_file or None))
        found[identity] = tests
    return found


def test_every_promise_names_the_tests_that_quote_its_id() -> None:
    promised, marked = promised_tests(), promising_tests()
    assert len(promised) > 80
    quoted = {identity for marks in marked.values() for identity in marks.promises}
    assert quoted == promised.keys()
    for identity, named in promised.items():
        assert named == {test for test, marks in marked.items() if identity in marks.promises}, (
            identity
        )


def test_every_line_of_who_is_trusted_with_what_names_a_promise() -> None:
    shown_by = [row[-1].strip("| ") for row in rows(page("security.md"))]
    assert len(shown_by) > 12
    for cell in [*shown_by, *re.findall(r"\(([A-Z]\d+(?:, [A-Z]\d+)*)\)", page("security.md"))]:
        assert set(cell.split(", ")) <= promised_tests().keys(), cell


def test_every_promise_has_a_test_that_runs_for_every_submission() -> None:
    marked = promising_tests()
    for identity, named in promised_tests().items():
        assert any(not marked[test].is_nightly for test in named), identity


def test_the_matrix_of_promises_and_faults_is_what_the_marks_of_the_tests_say() -> None:
    assert with_matrix(page("guarantees.md")) == page("guarantees.md"), "`make format` writes it"


def test_a_test_that_has_a_fault_says_what_it_promises() -> None:
    marked = marked_tests()
    promising = {file for file, _ in promising_tests()}
    for (file, test), marks in marked.items():
        of_file = marked.get((file, None), Marks()) if test else marks
        has_promise = marks.promises or of_file.promises or (test is None and file in promising)
        assert not marks.faults or has_promise, (file, test)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_table_is_broken_by_a_blank_line(document: Path) -> None:
    lines = ["", *prose(document.read_text(encoding="utf-8")).splitlines(), "", ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert re.fullmatch(r"\|[-| :]+\|", after), (
                f"a table begins without its heading: {line}"
            )


def test_the_walk_through_the_code_links_to_the_lines_that_it_names() -> None:
    text = page("walkthrough.md")
    assert len(LINK.findall(text)) > 20
    assert linked(text) == text
