"""The laws of the Databricks bundle: what its own tools check only once somebody deploys it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from databricks.bundles.jobs import ClusterSpec, Job
from hatchling.metadata.core import ProjectMetadata

from pipelines.cli import app

ROOT = Path(__file__).parent.parent.parent
LAYERS = ("bronze", "silver", "gold")
Document = dict[str, Any]


@dataclass
class Bundle:
    """`databricks.yml`, and the jobs of the files it includes by name; problems are sentences."""

    root: Path
    top: Document
    jobs: Document
    project: Any
    """The package, as the tool that builds the wheel reads it: its `name` and `scripts`."""

    def problems(self) -> list[str]:
        checks = (self._of_jobs, self._of_references, self._of_wheel_tasks, self._of_triggers, self._of_targets, self._of_files)
        return [problem for check in checks for problem in check()]

    def _of_jobs(self) -> Iterator[str]:
        """As strict as Databricks' own classes: no unknown field, no value of another type."""
        for name, job in self.jobs.items():
            yield from _refusal(f"job {name}", Job.from_dict, job)
        for name, variable in self.top["variables"].items():
            if variable.get("type") == "complex":
                yield from _refusal(f"variable {name}", ClusterSpec.from_dict, variable["default"])

    def _of_references(self) -> Iterator[str]:
        for text in _texts([self.top, self.jobs]):
            for reference in re.findall(r"\$\{(.*?)\}", text):
                kind, _, name = reference.partition(".")
                if kind == "var" and name not in self.top["variables"]:
                    yield f"there is no variable {name}"
                elif kind not in ("var", "bundle", "workspace"):
                    yield f"{reference} refers to nothing that is known here"
        for name, job in self.jobs.items():
            clusters = {cluster["job_cluster_key"] for cluster in job.get("job_clusters", [])}
            for task in job["tasks"]:
                if task.get("job_cluster_key") not in clusters:
                    yield f"{name}: there is no cluster {task.get('job_cluster_key')}"

    def _of_wheel_tasks(self) -> Iterator[str]:
        for layer in LAYERS:
            if layer not in self.jobs:
                yield f"{layer} has no job"
        for name, job in self.jobs.items():
            for task in job["tasks"]:
                wheel = task["python_wheel_task"]
                if wheel["package_name"] != self.project.name:
                    yield f"{name}: the package is not called {wheel['package_name']}"
                if wheel["entry_point"] not in self.project.scripts:
                    yield f"{name}: the package has no entry point {wheel['entry_point']}"
                parsed = _parsed(wheel["parameters"])
                if isinstance(parsed, str):
                    yield f"{name}: {parsed}"
                elif parsed != {"layers": name, "config": "${var.config}", "once": False}:
                    yield f"{name}: would run {parsed}"
                if not any("whl" in library for library in task.get("libraries", [])):
                    yield f"{name}: has no wheel to run"

    def _of_triggers(self) -> Iterator[str]:
        for name, job in self.jobs.items():
            if "continuous" not in job:
                yield f"{name} does not run continuously"
            for other in ("schedule", "trigger", "triggers"):
                if other in job:
                    yield f"{name} has a {other} beside continuous"
            if "pause_status" in (job.get("continuous") or {}):
                yield f"{name} writes pause_status out, so that development mode would not pause it"
            if any("max_retries" in task for task in job["tasks"]):
                yield f"{name} has a retry policy of its own, which a continuous job must not have"

    def _of_targets(self) -> Iterator[str]:
        for target, mode in (("dev", "development"), ("prod", "production")):
            if self.top["targets"].get(target, {}).get("mode") != mode:
                yield f"there is no target {target} of mode {mode}"
        defaults = [name for name, target in self.top["targets"].items() if target.get("default")]
        if defaults != ["dev"]:
            yield f"the default target is {defaults}"

    def _of_files(self) -> Iterator[str]:
        for pattern in self.top["include"]:
            if not list(self.root.glob(pattern)):
                yield f"include {pattern} matches no file"
        made = {self.root / artifact["path"] / "dist" for artifact in self.top["artifacts"].values()}
        for artifact in self.top["artifacts"].values():
            if not artifact["build"].endswith(" dist"):
                yield "the wheel is not built into dist"
        for job in self.jobs.values():
            for task in job["tasks"]:
                for library in task.get("libraries", []):
                    if (self.root / "resources" / library["whl"]).parent.resolve() not in {path.resolve() for path in made}:
                        yield f"{library['whl']} is not where the wheel is built"


def load(root: Path) -> Bundle:
    top = yaml.safe_load((root / "databricks.yml").read_text())
    jobs: Document = {}
    for pattern in top["include"]:
        for path in sorted(root.glob(pattern)):
            jobs |= yaml.safe_load(path.read_text())["resources"]["jobs"]
    return Bundle(root, top, jobs, ProjectMetadata(str(root), None).core)


def _refusal(what: str, make: Callable[[Any], object], document: Document) -> Iterator[str]:
    try:
        make(document)
    except ValueError as error:
        yield f"{what}: {error}"


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for item in part.values():
            yield from _texts(item)
    elif isinstance(part, list):
        for item in part:
            yield from _texts(item)


def _parsed(parameters: list[str]) -> Document | str:
    """What `watersmeet` would be told, by its own parser and without running it; or the parser's refusal."""
    group: Any = typer.main.get_command(app)
    try:
        context = group.make_context("watersmeet", list(parameters))
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        told = dict(command.make_context(name, rest, parent=context).params)
    except (typer.Exit, typer.TyperException) as error:
        return f"watersmeet {' '.join(parameters)}: {error}"
    if name != "run":
        return f"watersmeet {' '.join(parameters)} runs no stream"
    return {"layers": told["layers"], "config": str(told["config"]), "once": told["once"]}


@pytest.fixture
def bundle() -> Bundle:
    return load(ROOT)


def test_the_bundle_has_no_problem(bundle: Bundle) -> None:
    assert bundle.problems() == []


def test_the_bundle_has_one_job_for_each_layer(bundle: Bundle) -> None:
    assert sorted(bundle.jobs) == sorted(LAYERS)


def _set(value: Any, *path: str | int) -> Callable[[Bundle], None]:
    """Sets a value of the bundle; the path begins with `top` or `jobs`."""

    def change(bundle: Bundle) -> None:
        part: Any = vars(bundle)
        for step in path[:-1]:
            part = part[step]
        part[path[-1]] = value

    return change


TASK = ("jobs", "gold", "tasks", 0)
WHEEL = (*TASK, "python_wheel_task")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_set("soon", "jobs", "gold", "nme"), "Unexpected field 'nme'"),
        (_set("MAYBE", "jobs", "gold", "continuous", "task_retry_mode"), "MAYBE"),
        (_set(4, "top", "variables", "cluster", "default", "cores"), "variable cluster: Unexpected field 'cores'"),
        (_set("${var.cfg}", "jobs", "gold", "description"), "there is no variable cfg"),
        (_set("${var.size}", "top", "variables", "cluster", "default", "node_type_id"), "there is no variable size"),
        (_set("${resources.jobs.x.id}", "jobs", "gold", "description"), "refers to nothing"),
        (_set("golden", *TASK, "job_cluster_key"), "gold: there is no cluster golden"),
        (_set("waters", *WHEEL, "package_name"), "not called waters"),
        (_set("pipelines", *WHEEL, "entry_point"), "no entry point pipelines"),
        (_set(["run", "platinum", "-c", "${var.config}"], *WHEEL, "parameters"), "platinum"),
        (_set(["run", "silver", "-c", "${var.config}"], *WHEEL, "parameters"), "gold: would run"),
        (_set(["run", "gold"], *WHEEL, "parameters"), "gold: would run"),
        (_set(["run", "gold", "-c", "${var.config}", "--once"], *WHEEL, "parameters"), "gold: would run"),
        (_set(["run", "gold", "--config-file", "x"], *WHEEL, "parameters"), "--config-file"),
        (_set(["march", "gold"], *WHEEL, "parameters"), "march"),
        (_set(["status"], *WHEEL, "parameters"), "runs no stream"),
        (_set([], *TASK, "libraries"), "has no wheel to run"),
        (_set([{"whl": "dist/*.whl"}], *TASK, "libraries"), "not where the wheel is built"),
        (
            _set({"quartz_cron_expression": "0 0 * * * ?", "timezone_id": "UTC"}, "jobs", "gold", "schedule"),
            "has a schedule beside",
        ),
        (_set("UNPAUSED", "jobs", "gold", "continuous", "pause_status"), "writes pause_status out"),
        (_set(-1, *TASK, "max_retries"), "retry policy of its own"),
        (lambda bundle: bundle.jobs["gold"].pop("continuous"), "gold does not run continuously"),
        (lambda bundle: bundle.jobs.pop("gold"), "gold has no job"),
        (_set("production", "top", "targets", "dev", "mode"), "no target dev of mode development"),
        (lambda bundle: bundle.top["targets"].pop("prod"), "no target prod of mode production"),
        (_set(True, "top", "targets", "prod", "default"), "the default target is"),
        (_set(["jobs/*.yml"], "top", "include"), "include jobs/*.yml matches no file"),
        (_set("python3 -m pip wheel .", "top", "artifacts", "watersmeet", "build"), "not built into dist"),
    ],
)
def test_a_broken_bundle_is_noticed(bundle: Bundle, change: Callable[[Bundle], object], problem: str) -> None:
    broken = copy.deepcopy(bundle)
    change(broken)
    assert [found for found in broken.problems() if problem in found], broken.problems()
