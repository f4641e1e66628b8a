"""What a run exposes to Prometheus, and what the dashboard and the alerts ask of it."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

RESOURCES = Path(__file__).parents[2] / "resources"
OF_PROMETHEUS = frozenset(["job", "instance", "le"])
"""Labels that Prometheus adds to what it scrapes, and the one of a histogram's buckets."""


class Exposed:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        self.samples = [(sample.name, sample.labels, sample.value) for sample in found]

    def value(self, name: str, **labels: object) -> float | None:
        """The sum of the samples with these labels; None where there is none."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        values = [
            value
            for its_name, its_labels, value in self.samples
            if its_name == name and wanted <= its_labels.items()
        ]
        return sum(values) if values else None

    def labels(self, name: str) -> set[str]:
        return {
            label for its_name, labels, _ in self.samples if its_name == name for label in labels
        }

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.samples}


def scrape(port: int) -> Exposed | None:
    """What a process exposes; None where it does not answer (yet)."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return Exposed(answer.read().decode())
    except OSError:
        return None


class Asked(NamedTuple):
    """A metric that an expression asks for: the labels that it names, and the values that it wants
    of some of them."""

    name: str
    labels: frozenset[str]
    values: tuple[tuple[str, str], ...]


def alerts() -> list[dict[str, Any]]:
    """Every alerting rule."""
    file = yaml.safe_load((RESOURCES / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in file["groups"] for rule in group["rules"]]


def targets() -> list[dict[str, Any]]:
    """Every query of the dashboard."""
    dashboard = json.loads((RESOURCES / "grafana.json").read_text(encoding="utf-8"))
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def expressions() -> Iterator[str]:
    """Every expression of the dashboard and the alerts, as Grafana sends it."""
    for target in targets():
        yield as_sent(target["expr"])
    for rule in alerts():
        yield rule["expr"]


def as_sent(expression: str) -> str:
    """An expression of the dashboard as Grafana sends it."""
    return expression.replace("$__rate_interval", "5m").replace("$job", ".*")


def asked(expression: str) -> list[Asked]:
    """What an expression asks for; labels by which it groups or matches are asked of every metric
    in that part of it. Raises ValueError where it is no PromQL.
    """
    return list(_asked(promql.parse(expression), frozenset()))


def _asked(part: Any, labels: frozenset[str]) -> Iterator[Asked]:
    if isinstance(part, promql.VectorSelector):
        matchers = part.matchers.matchers
        values = tuple((m.name, m.value) for m in matchers if m.op == promql.MatchOp.Equal)
        yield Asked(part.name or "", labels | {m.name for m in matchers}, values)
    elif isinstance(part, promql.AggregateExpr):
        # No other label leaves it.
        yield from _asked(part.expr, frozenset(part.modifier.labels if part.modifier else ()))
    elif isinstance(part, promql.BinaryExpr):
        matching = part.modifier.matching if part.modifier else None
        for side in (part.lhs, part.rhs):
            yield from _asked(side, labels | frozenset(matching.labels if matching else ()))
    elif isinstance(part, promql.Call):
        for argument in part.args:
            yield from _asked(argument, labels)
    elif isinstance(part, promql.MatrixSelector):
        yield from _asked(part.vector_selector, labels)
    elif isinstance(part, (promql.ParenExpr, promql.SubqueryExpr, promql.UnaryExpr)):
        yield from _asked(part.expr, labels)


def shown_labels() -> Iterator[tuple[list[Asked], str]]:
    """Every label that a legend or an annotation shows, with what its expression asks for."""
    texts = [(target["expr"], target["legendFormat"]) for target in targets()]
    texts += [(rule["expr"], " ".join(rule["annotations"].values())) for rule in alerts()]
    for expression, text in texts:
        usable = asked(expression.replace("$__rate_interval", "5m"))
        for label in re.findall(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}", text):
            yield usable, label
