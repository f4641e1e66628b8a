"""The Databricks bundle, and what is wrong with it: what Databricks' strict classes see, and what
they do not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import typer
import yaml
from databricks.bundles.jobs import ClusterSpec, Job, JobPermission, JobRunAs
from databricks.bundles.schemas import Schema
from databricks.bundles.volumes import Volume
from hatchling.metadata.core import ProjectMetadata

from watersmeet.cli import app

LAYERS = ("bronze", "silver", "gold")
Document = dict[str, Any]

KINDS: Mapping[str, Callable[[Any], object]] = {
    "jobs": Job.from_dict,
    "schemas": Schema.from_dict,
    "volumes": Volume.from_dict,
}
TOP = {"bundle", "include", "sync", "artifacts", "variables", "targets"}
TARGET = {"mode", "default", "variables", "workspace", "run_as", "permissions", "resources"}
VARIABLE = {"description", "default", "type"}
"""The fields of `databricks.yml` that are used; a field more is a mistake until it is added
here."""

BUILT_IN = {"bundle.name", "bundle.target", "workspace.current_user.userName"}
COMPUTED = {"volumes": {"volume_path"}}
"""Fields of a resource that nobody writes."""

WATCHED = {"RUN_DURATION_SECONDS": "on_duration_warning_threshold_exceeded"}
"""Who hears of a health metric; of the others, `STREAMING_BACKLOG_...`:"""
BACKLOG = "on_streaming_backlog_exceeded"


@dataclass
class Bundle:
    """`databricks.yml`, and the resources of the files it includes by kind and name; problems are
    sentences."""

    root: Path
    top: Document
    resources: Document
    project: Any
    """The package, as the tool that builds the wheel reads it: `name`, `scripts` and
    `optional_dependencies`."""

    @classmethod
    def load(cls, root: Path) -> Bundle:
        top = yaml.safe_load((root / "databricks.yml").read_text())
        resources: Document = {}
        for pattern in top["include"]:
            for path in sorted(root.glob(pattern)):
                resources = merged(resources, yaml.safe_load(path.read_text())["resources"])
        return cls(root, top, resources, ProjectMetadata(str(root), None).core)

    @property
    def jobs(self) -> Document:
        jobs: Document = self.resources["jobs"]
        return jobs

    def problems(self) -> list[str]:
        checks = (
            *(
                self._of_fields,
                self.of_types,
                self._of_references,
                self._of_secrets,
                self._of_tasks,
                self._of_commands,
            ),
            *(
                self._of_layers,
                self._of_triggers,
                self._of_alerts,
                self._of_targets,
                self._of_files,
            ),
        )
        return [problem for check in checks for problem in check()]

    def variables(self, target: str) -> Document:
        """The value of each variable in a target, where it has one without being given."""
        found = {
            name: each["default"]
            for name, each in self.top["variables"].items()
            if "default" in each
        }
        return {**found, **self.top["targets"].get(target, {}).get("variables", {})}

    def resolved(self, target: str, part: Any) -> Any:
        """A part with the values of variables in place of their references."""
        values = self.variables(target)

        def resolve(part: Any) -> Any:
            if isinstance(part, dict):
                return {key: resolve(value) for key, value in part.items()}
            if isinstance(part, list):
                return [resolve(value) for value in part]
            whole = re.fullmatch(r"\$\{var\.(\w+)\}", part) if isinstance(part, str) else None
            return resolve(values[whole[1]]) if whole and whole[1] in values else part

        return resolve(part)

    @cached_property
    def _tasks(self) -> list[tuple[str, Document, Document]]:
        """Each task with its job and a name for both."""
        return [
            (f"{name}.{task['task_key']}", job, task)
            for name, job in self.jobs.items()
            for task in job["tasks"]
        ]

    # -- fields and types

    def _of_fields(self) -> Iterator[str]:
        parts = [("databricks.yml", self.top, TOP)]
        parts += [
            (f"target {name}", target, TARGET) for name, target in self.top["targets"].items()
        ]
        parts += [
            (f"variable {name}", each, VARIABLE) for name, each in self.top["variables"].items()
        ]
        for what, part, known in parts:
            yield from (f"{what}: unknown field {name}" for name in part.keys() - known)

    def of_types(self) -> Iterator[str]:
        """As strict as Databricks' own classes: no unknown field, no value of another type; in each
        target."""
        for target, own in self.top["targets"].items():
            resources = self.resolved(target, merged(self.resources, own.get("resources", {})))
            for kind, named in resources.items():
                for name, resource in named.items():
                    yield from _refusal(f"{kind} {name} in {target}", KINDS[kind], resource)
            yield from _refusal(f"run_as in {target}", JobRunAs.from_dict, own.get("run_as", {}))
            for permission in own.get("permissions", []):
                yield from _refusal(f"permissions in {target}", JobPermission.from_dict, permission)
        yield from _refusal(
            "variable cluster", ClusterSpec.from_dict, self.top["variables"]["cluster"]["default"]
        )

    # -- references

    def _of_references(self) -> Iterator[str]:
        used = set()
        for text in _texts([self.top, self.resources]):
            for reference in re.findall(r"\$\{(.*?)\}", text):
                kind, _, name = reference.partition(".")
                if kind == "var":
                    used.add(name)
                    if name not in self.top["variables"]:
                        yield f"there is no variable {name}"
                elif kind == "resources":
                    what, which, field = (*name.split("."), "", "")[:3]
                    found = self.resources.get(what, {}).get(which, {})
                    if not found or field not in found.keys() | COMPUTED.get(what, set()):
                        yield f"{reference} refers to no resource's field"
                elif reference not in BUILT_IN:
                    yield f"{reference} refers to nothing that is known here"
        variables = self.top["variables"].keys()
        yield from (f"nobody uses the variable {name}" for name in variables - used)
        for target, own in self.top["targets"].items():
            yield from (
                f"{target}: no variable {name}"
                for name in own.get("variables", {}).keys() - self.top["variables"].keys()
            )
            for kind, named in own.get("resources", {}).items():
                yield from (
                    f"{target}: no {kind} {name}"
                    for name in named.keys() - self.resources[kind].keys()
                )

    def _of_secrets(self) -> Iterator[str]:
        for text in _texts([self.top, self.resources]):
            if "{{" in text and not re.fullmatch(
                r"\{\{secrets/(\$\{var\.\w+\}|[\w-]+)/[\w-]+\}\}", text
            ):
                yield f"{text} is no reference to a secret"
        for name, value in self.top["variables"]["cluster"]["default"]["spark_env_vars"].items():
            if re.search("PASSWORD|SECRET|TOKEN", name) and not value.startswith("{{secrets/"):
                yield f"{name} is not taken from a secret scope"

    # -- tasks

    def _of_tasks(self) -> Iterator[str]:
        """Clusters, dependencies, libraries: all of them exist."""
        for what, job, task in self._tasks:
            clusters = {cluster["job_cluster_key"] for cluster in job.get("job_clusters", [])}
            if task.get("job_cluster_key") not in clusters:
                yield f"{what}: there is no cluster {task.get('job_cluster_key')}"
            others = {other["task_key"] for other in job["tasks"]} - {task["task_key"]}
            for before in task.get("depends_on", []):
                if before["task_key"] not in others:
                    yield f"{what}: depends on {before['task_key']}, which is no other task"
            if not any("whl" in library for library in task.get("libraries", [])):
                yield f"{what}: has no wheel to run"
            for library in task.get("libraries", []):
                extras = [
                    asked
                    for extra in self.project.optional_dependencies.values()
                    for asked in extra
                ]
                if "pypi" in library and library["pypi"]["package"] not in extras:
                    yield f"{what}: {library['pypi']['package']} is not what the package asks for"
            packages = [
                each["pypi"]["package"] for each in task.get("libraries", []) if "pypi" in each
            ]
            needed = {"run bronze": "registry", "check": "quality"}.get(_words(task))
            if needed and not {*self.project.optional_dependencies[needed]} <= {*packages}:
                yield f"{what}: lacks packages of the extra {needed}"
        for name, job in self.jobs.items():
            keys = [task["task_key"] for task in job["tasks"]]
            yield from (
                f"{name}: two tasks are called {key}" for key in set(keys) if keys.count(key) > 1
            )

    def _of_commands(self) -> Iterator[str]:
        """What wheel tasks run is in the wheel, and its own parser takes the words."""
        for what, job, task in self._tasks:
            if "python_wheel_task" not in task:
                continue
            wheel = task["python_wheel_task"]
            if wheel["package_name"] != self.project.name:
                yield f"{what}: the package is not called {wheel['package_name']}"
            if wheel["entry_point"] not in self.project.scripts:
                yield f"{what}: the package has no entry point {wheel['entry_point']}"
            told = parsed(wheel["parameters"])
            if isinstance(told, str):
                yield f"{what}: {told}"
                continue
            if told["config"] != "${var.config}":
                yield f"{what}: does not read the configuration of the bundle"
            if told["command"] == "run" and told["once"] == ("continuous" in job):
                yield f"{what}: {'ends at once' if told['once'] else 'never ends'}"

    def _of_layers(self) -> Iterator[str]:
        """Each layer has a job of its own, and the scheduled job runs them in order, and then looks
        after the tables."""
        for layer in LAYERS:
            if [_words(task) for task in self.jobs.get(layer, {}).get("tasks", [])] != [
                f"run {layer}"
            ]:
                yield f"{layer} has no job that runs it and nothing else"
        tasks = self.jobs.get("scheduled", {}).get("tasks", [])
        if [_words(task) for task in tasks] != [*(f"run {layer}" for layer in LAYERS), "maintain"]:
            yield "the scheduled job does not run the layers in order"
        for before, task in zip([None, *tasks], tasks, strict=False):
            wanted = [] if before is None else [{"task_key": before["task_key"]}]
            if task.get("depends_on", []) != wanted:
                yield f"scheduled.{task['task_key']} does not wait for what comes before it"

    # -- triggers, alerts, targets

    def _of_triggers(self) -> Iterator[str]:
        for name, job in self.jobs.items():
            triggers = [
                trigger for trigger in ("continuous", "schedule", "trigger") if trigger in job
            ]
            if len(triggers) != 1:
                yield f"{name} has the triggers {triggers}"
            for trigger in triggers:
                status = job[trigger].get("pause_status")
                if status is not None and status not in ("${var.continuous}", "${var.scheduled}"):
                    yield (
                        f"{name} writes pause_status out, so that development mode would not pause "
                        "it"
                    )
            if "continuous" in job:
                yield from _of_continuous(name, job)
            elif job.get("max_concurrent_runs") != 1:
                yield f"{name} may run beside itself"
        for target in self.top["targets"]:
            found = {name: self.variables(target).get(name) for name in ("continuous", "scheduled")}
            if not set(found.values()) <= {"PAUSED", "UNPAUSED"}:
                yield f"{target}: a trigger is PAUSED or UNPAUSED, not {found}"
            if list(found.values()).count("UNPAUSED") != (target == "prod"):
                yield f"{target}: what runs by itself is {found}"

    def _of_alerts(self) -> Iterator[str]:
        """Somebody hears of each failure, and of each health rule. Bronze has none: it asks Kafka
        itself, without a stream whose backlog Databricks could tell."""
        for name, job in self.jobs.items():
            rules = [rule["metric"] for rule in job.get("health", {}).get("rules", [])]
            kinds = {"duration" if metric in WATCHED else "backlog" for metric in rules}
            wanted = {"backlog"} if "continuous" in job else {"duration"}
            if kinds != (set() if name == "bronze" else wanted):
                yield f"{name} has the health rules {rules}"
            errors = {"on_failure", *(WATCHED.get(metric, BACKLOG) for metric in rules)}
            for channel, to in (
                ("email_notifications", "${var.emails}"),
                ("webhook_notifications", "${var.webhooks}"),
            ):
                if job.get(channel) != dict.fromkeys(errors, to):
                    yield f"{name}: {channel} are not {sorted(errors)} to {to}"

    def _of_targets(self) -> Iterator[str]:
        targets = self.top["targets"]
        for target, mode in (("dev", "development"), ("prod", "production")):
            if targets.get(target, {}).get("mode") != mode:
                yield f"there is no target {target} of mode {mode}"
        defaults = [name for name, target in targets.items() if target.get("default")]
        if defaults != ["dev"]:
            yield f"the default target is {defaults}"
        yield from self._of_production(targets.get("prod", {}))
        for target in targets:
            missing = self.top["variables"].keys() - self.variables(target).keys()
            if missing != ({"service_principal", "operators"} if target == "prod" else set()):
                yield f"{target} is deployed without values for {sorted(missing)}"

    def _of_production(self, prod: Document) -> Iterator[str]:
        if prod.get("run_as") != {"service_principal_name": "${var.service_principal}"}:
            yield "prod does not run as the service principal"
        if not prod.get("permissions"):
            yield "prod says nothing about permissions"
        if any("current_user" in str(each) for each in prod.get("permissions", [])):
            yield "prod takes whoever deploys it for a person, or for a service principal"
        for kind in ("schemas", "volumes"):
            for name in self.resources[kind]:
                kept = (
                    prod.get("resources", {})
                    .get(kind, {})
                    .get(name, {})
                    .get("lifecycle", {})
                    .get("prevent_destroy")
                )
                if kept is not True:
                    yield f"prod would let {kind} {name} be destroyed"

    def _of_files(self) -> Iterator[str]:
        for pattern in self.top["include"]:
            if not list(self.root.glob(pattern)):
                yield f"include {pattern} matches no file"
        for path in self.top["sync"]["paths"]:
            if not (self.root / path).is_dir():
                yield f"sync: there is no folder {path}"
        made = {
            (self.root / artifact["path"] / "dist").resolve()
            for artifact in self.top["artifacts"].values()
        }
        for artifact in self.top["artifacts"].values():
            if not artifact["build"].endswith(" dist"):
                yield "the wheel is not built into dist"
        for what, _, task in self._tasks:
            for library in task.get("libraries", []):
                if (
                    "whl" in library
                    and (self.root / "resources" / library["whl"]).parent.resolve() not in made
                ):
                    yield f"{what}: {library['whl']} is not where the wheel is built"


def _of_continuous(name: str, job: Document) -> Iterator[str]:
    """Fields that a continuous job must not have."""
    if any("max_retries" in task for task in job["tasks"]):
        yield f"{name} has a retry policy of its own, which a continuous job must not have"
    if any("depends_on" in task or "environment_key" in task for task in job["tasks"]):
        yield f"{name} has dependencies or is serverless, which a continuous job must not be"


def parsed(parameters: list[str]) -> Document | str:
    """What `watersmeet` would be told, by its own parser and without running it (and `command`); or
    the parser's refusal."""
    group = _watersmeet()
    try:
        context = group.make_context("watersmeet", list(parameters))
        name, command, rest = group.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        told = dict(command.make_context(name, rest, parent=context).params)
    except (typer.Exit, typer.TyperException) as error:
        return f"watersmeet {' '.join(parameters)}: {error}"
    return {**told, "command": name, "config": str(told.get("config"))}


@cache
def _watersmeet() -> Any:
    return typer.main.get_command(app)


def merged(one: Document, other: Document) -> Document:
    """Both, and what is in both merged in its turn."""
    common = {
        key: merged(one[key], other[key])
        for key in one.keys() & other.keys()
        if isinstance(one[key], dict)
    }
    return {**one, **other, **common}


def _words(task: Document) -> str:
    """The command of a task and its layer."""
    told = parsed(task.get("python_wheel_task", {}).get("parameters", []))
    return (
        str(told)
        if isinstance(told, str)
        else " ".join(filter(None, [told["command"], told.get("layers")]))
    )


def _refusal(what: str, make: Callable[[Any], object], document: Document) -> Iterator[str]:
    try:
        make(document)
    except (
        ValueError,
        TypeError,
    ) as error:  # a field that is missing is an argument that is missing
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
