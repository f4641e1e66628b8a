"""What watches a run fits together: the page, the dashboard and the alerts name metrics and labels
that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.metrics import (
    OF_PROMETHEUS,
    RESOURCES,
    Exposed,
    alerts,
    as_sent,
    asked,
    expressions,
    shown_labels,
    targets,
)
from watersmeet.core.reading import Reason
from watersmeet.errors import kinds
from watersmeet.monitoring.events import (
    BronzeProgress,
    MergeProgress,
    Published,
    RecordsProcessed,
    Sampled,
    SourceStanding,
    StepDone,
    TenantsSampled,
)
from watersmeet.monitoring.metrics import METRICS, STATES, Metrics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipelines" / "watersmeet"
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
OF_PROCESS = re.compile("process_(start_time_seconds|resident_memory_bytes|cpu_seconds_total)")
KNOWN_VALUES = {
    "kind": set(kinds()),
    "layer": {"bronze", "silver", "gold"},
    "outcome": {
        *(
            "accepted",
            "heartbeat",
            "skipped",
            "quarantined",
            "merged",
            "late",
            "corrected",
            "not_corrected",
            "recovered",
            "duplicate",
            "excess",
            "published",
            "copied",
        ),
    },
    "state": set(STATES),
    "reason": {reason.value for reason in Reason},
}


def exposed(metrics: Metrics) -> Exposed:
    from prometheus_client import generate_latest

    return Exposed(generate_latest(metrics.registry).decode())


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of one of the page's tables under a heading, the first unless a number says
    otherwise."""
    [part] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"(?:^\|.*\|\n)+", part, re.MULTILINE)[number].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_metric_has_a_row_in_order() -> None:
    rows = [
        (row[0].strip("`"), row[1], tuple(re.findall(r"`(\w+)`", row[2])))
        for row in table("Metrics")
    ]
    assert rows == [(f"watersmeet_{metric.name}", metric.kind, metric.labels) for metric in METRICS]


def test_every_alert_has_a_row_in_order() -> None:
    assert [row[0].strip("`") for row in table("Dashboard and alerts")] == [
        rule["alert"] for rule in alerts()
    ]


def test_every_step_and_outcome_of_a_layer_has_a_row() -> None:
    steps = {
        (row[0], name) for row in table("Metrics", 2) for name in re.findall(r"`(\w+)`", row[1])
    }
    code = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    stage = (PACKAGE / "repartition" / "command.py").read_text(encoding="utf-8")
    of_stage = {("repartition", step) for step in re.findall(r'StepDone\(_LAYER, "(\w+)"', stage)}
    assert steps == set(re.findall(r'\.step\("(\w+)", "(\w+)"\)', code)) | of_stage
    outcomes = {name for row in table("Metrics", 1) for name in re.findall(r"`(\w+)`", row[1])}
    assert outcomes == KNOWN_VALUES["outcome"]


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_asks_for_metrics_and_labels_that_there_are(expression: str) -> None:
    labels = {f"watersmeet_{metric.name}": set(metric.labels) for metric in METRICS}
    found = asked(expression)
    assert found
    for name, wanted, values in found:
        if OF_PROCESS.fullmatch(name):
            assert wanted <= OF_PROMETHEUS
            continue
        base = re.sub("_(bucket|sum|count)$", "", name) if "step_seconds" in name else name
        assert wanted <= labels[base] | OF_PROMETHEUS, name
        for label, value in values:
            assert label == "job" or value in KNOWN_VALUES[label], value


def test_every_metric_has_a_panel() -> None:
    shown = {
        re.sub("_(bucket|sum|count)$", "", each.name)
        for target in targets()
        for each in asked(as_sent(target["expr"]))
    }
    assert {f"watersmeet_{metric.name}" for metric in METRICS} <= shown


def test_what_is_shown_of_a_metric_is_a_label_that_is_left() -> None:
    shown = list(shown_labels())
    assert len(shown) > 20
    for found, label in shown:
        assert any(label in each.labels | OF_PROMETHEUS for each in found), (found, label)


@pytest.mark.parametrize("wrong", ["sum(", "rate(watersmeet_clock_seconds)", "a{b=}"])
def test_what_is_no_promql_is_noticed(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        asked(wrong)


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """What its import asks for: a title, a schema version, numbered panels that have a place, and
    sources by variable."""
    dashboard = json.loads((RESOURCES / "grafana.json").read_text(encoding="utf-8"))
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    panels = dashboard["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    places = {(x, y) for p in panels for x, y in _cells(p["gridPos"])}
    assert len(places) == sum(p["gridPos"]["w"] * p["gridPos"]["h"] for p in panels), (
        "panels lie on each other"
    )
    assert max(x for x, _ in places) < 24
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    named = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(panels)))
    assert named - variables == {"__rate_interval"}
    assert all(panel["description"] for panel in panels)


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    return [(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])]


# -- the metrics, told by hand


def test_lag_is_what_kafka_has_and_a_layer_has_not_passed(tmp_path: Path) -> None:
    metrics, tp = Metrics(settings_for(tmp_path)), tp_of("tracking", 1)
    metrics(BronzeProgress({tp: 7}))
    assert exposed(metrics).value("watersmeet_lag_records") is None, (
        "nobody has said yet where Kafka ends"
    )
    metrics(Sampled({tp: (0, 10)}, None))
    assert (
        exposed(metrics).value(
            "watersmeet_lag_records", layer="bronze", topic="tracking", partition=1
        )
        == 3
    )
    metrics(BronzeProgress({tp: 12}))
    assert exposed(metrics).value("watersmeet_lag_records", layer="bronze") == 0, (
        "bronze is ahead of the last sample"
    )
    metrics(MergeProgress({}, {tp: SourceStanding(0, None, None, "waiting")}))
    metrics(Sampled({tp: (9, 12)}, None))
    assert exposed(metrics).value("watersmeet_lag_records", layer="silver") == 3, (
        "Kafka has deleted the first 9"
    )


def test_lag_in_seconds_is_the_age_of_the_last_record_merged_while_others_wait(
    tmp_path: Path,
) -> None:
    metrics, tp = Metrics(settings_for(tmp_path)), tp_of("orders", 0)
    metrics(Sampled({tp: (0, 5)}, 2))
    metrics(MergeProgress({0: 1_000}, {tp: SourceStanding(4, 1_000, 3_500, "held")}))
    seen = exposed(metrics)
    assert (seen.value("watersmeet_lag_seconds") or 0) > 1e9
    assert seen.value("watersmeet_clock_seconds", partition=0) == 1
    assert seen.value("watersmeet_lead_seconds", topic="orders") == 2.5
    assert seen.value("watersmeet_open_rows") == 2
    assert seen.value("watersmeet_source_state", state="held") == 1
    metrics(MergeProgress({0: 3_500}, {tp: SourceStanding(5, 3_500, 3_500, "active")}))
    metrics(Sampled({}, None))
    seen = exposed(metrics)
    assert seen.value("watersmeet_lag_seconds") == 0
    assert [seen.value("watersmeet_source_state", state=state) for state in STATES] == [1, 0, 0, 0]
    assert seen.value("watersmeet_open_rows") == 2, "a sample that did not ask leaves it as it was"


def test_how_tenants_stand_is_told_without_naming_them(tmp_path: Path) -> None:
    metrics = Metrics(settings_for(tmp_path))
    names = [f"watersmeet_{name}" for name in ("waiting_rows", "tenants", "tenant_lag_seconds")]
    assert [exposed(metrics).value(name) for name in names] == [0, 0, 0]
    metrics(Sampled({}, 2, TenantsSampled(7, 3, 1_500)))
    metrics(Sampled({}, 2))
    assert [exposed(metrics).value(name) for name in names] == [7, 3, 1.5]


def test_labels_are_names_of_the_configuration(tmp_path: Path) -> None:
    metrics = Metrics(settings_for(tmp_path))
    metrics(StepDone("silver", "merge", 0.2))
    metrics(
        RecordsProcessed(
            "bronze", {"tracking": {("quarantined", "no_key"): 2, ("accepted", ""): 5}}
        )
    )
    metrics(Published("merged", {0: 4, 1: 0}))
    seen = exposed(metrics)
    assert seen.value("watersmeet_step_seconds_sum", layer="silver", step="merge") == 0.2
    assert seen.value("watersmeet_records_total", topic="tracking") == 7
    assert seen.value("watersmeet_records_total", outcome="quarantined", reason="no_key") == 2
    assert seen.value("watersmeet_sequence", topic="merged", partition=0) == 4
    for metric in METRICS:
        found = seen.labels(
            f"watersmeet_{metric.name}{'_sum' if metric.kind == 'histogram' else ''}"
        )
        assert found in (set(), set(metric.labels)), metric.name
