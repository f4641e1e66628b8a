"""The laws of the Databricks bundle: what its own tools check only once somebody deploys it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundle import LAYERS, Bundle

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def loaded() -> Bundle:
    return Bundle.load(ROOT)


@pytest.fixture
def bundle(loaded: Bundle) -> Bundle:
    return Bundle(
        loaded.root, copy.deepcopy(loaded.top), copy.deepcopy(loaded.resources), loaded.project
    )


def test_the_bundle_has_no_problem(bundle: Bundle) -> None:
    assert bundle.problems() == []


def test_the_bundle_has_a_job_for_each_layer_one_for_all_and_one_that_checks(
    bundle: Bundle,
) -> None:
    assert sorted(bundle.jobs) == sorted([*LAYERS, "scheduled", "quality"])


@pytest.mark.parametrize("folder", ["pipelines", "notebooks"])
def test_nothing_that_runs_there_uses_the_spark_context_or_what_spark_keeps_for_itself(
    folder: str,
) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".ipynb")]
    assert files
    pattern = re.compile(r"\.(sparkContext|_sc|_jvm|_jsc|_jdf|_jsparkSession|_gateway)\b")
    assert {
        path.name: found
        for path in files
        if (found := pattern.findall(path.read_text(encoding="utf-8")))
    } == {}


# -- the page

PAGE = (ROOT / "docs" / "databricks.md").read_text(encoding="utf-8")


def test_every_variable_has_a_row(bundle: Bundle) -> None:
    section = PAGE.partition("\n## Variables\n")[2].partition("\n## ")[0]
    named = [
        name
        for row in section.splitlines()
        if row.startswith("| `")
        for name in row.split("|")[1].split("`")[1::2]
    ]
    assert sorted(named) == sorted(bundle.top["variables"])


def test_the_values_for_prod_that_are_shown_are_of_variables_and_all_that_it_takes(
    bundle: Bundle,
) -> None:
    [shown] = re.findall(r"^```json\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    values = json.loads(shown)
    assert values.keys() <= bundle.top["variables"].keys()
    assert values.keys() >= bundle.top["variables"].keys() - bundle.variables("prod").keys()
    for name, value in values.items():
        bundle.top["variables"][name]["default"] = value
    assert list(bundle.of_types()) == []


# -- planted mistakes

Change = Callable[[Bundle], object]


def _set(value: Any, *path: str | int) -> Change:
    """Sets a value of the bundle; the path begins with `top` or `resources`."""

    def change(bundle: Bundle) -> None:
        part: Any = vars(bundle)
        for step in path[:-1]:
            part = part[step]
        part[path[-1]] = value

    return change


def _drop(*path: str | int) -> Change:
    def change(bundle: Bundle) -> None:
        part: Any = vars(bundle)
        for step in path[:-1]:
            part = part[step]
        del part[path[-1]]

    return change


JOBS = ("resources", "jobs")
GOLD = (*JOBS, "gold")
TASK = (*GOLD, "tasks", 0)
WHEEL = (*TASK, "python_wheel_task")
SCHEDULED = (*JOBS, "scheduled")
CHECK = (*JOBS, "quality", "tasks", 1)
VARIABLES = ("top", "variables")
CLUSTER = (*VARIABLES, "cluster", "default")
PROD = ("top", "targets", "prod")
CONFIG = ["-c", "${var.config}"]

PLANTED: list[tuple[Change, str]] = [
    # fields and types
    (_set("soon", *GOLD, "nme"), "jobs gold in dev: Unexpected field 'nme'"),
    (_set("MAYBE", *GOLD, "continuous", "task_retry_mode"), "MAYBE"),
    (_set("many", *GOLD, "health", "rules", 0, "value"), "jobs gold in dev"),
    (_set("LAG", *GOLD, "health", "rules", 0, "metric"), "LAG"),
    (_set(4, *CLUSTER, "cores"), "variable cluster: Unexpected field 'cores'"),
    (_set("a@example.org", *VARIABLES, "emails", "default"), "jobs bronze in prod"),
    (
        _set("me", "resources", "schemas", "lake", "owner"),
        "schemas lake in dev: Unexpected field 'owner'",
    ),
    (_set("LOCAL", "resources", "volumes", "files", "volume_type"), "volumes files in dev"),
    (
        _set(["READ"], *PROD, "resources", "volumes", "files", "grants", 0, "privileges"),
        "volumes files in prod",
    ),
    (_set("CAN_FLY", *PROD, "permissions", 0, "level"), "permissions in prod"),
    (_set({"principal": "x"}, *PROD, "run_as"), "run_as in prod"),
    (_set(["tests"], "top", "syncs"), "databricks.yml: unknown field syncs"),
    (_set("x", *PROD, "runas"), "target prod: unknown field runas"),
    (_set("x", *VARIABLES, "cron", "value"), "variable cron: unknown field value"),
    # references
    (_set("${var.cfg}", *GOLD, "description"), "there is no variable cfg"),
    (_set("${var.size}", *CLUSTER, "node_type_id"), "there is no variable size"),
    (
        _set("${resources.jobs.x.id}", *GOLD, "description"),
        "resources.jobs.x.id refers to no resource's field",
    ),
    (
        _set("${resources.schemas.lake.title}", *CLUSTER, "spark_env_vars", "LAKE_SCHEMA"),
        "lake.title refers to no resource's field",
    ),
    (_set("${workspace.user}", *GOLD, "description"), "workspace.user refers to nothing"),
    (_set({"default": "x"}, *VARIABLES, "spare"), "nobody uses the variable spare"),
    (_set({"spare": "x"}, *PROD, "variables"), "prod: no variable spare"),
    (_set({"name": "x"}, *PROD, "resources", "schemas", "pool"), "prod: no schemas pool"),
    (
        _set("{{secret/a/b}}", *CLUSTER, "spark_env_vars", "KAFKA_USERNAME"),
        "{{secret/a/b}} is no reference to a secret",
    ),
    (
        _set("hunter2", *CLUSTER, "spark_env_vars", "KAFKA_PASSWORD"),
        "KAFKA_PASSWORD is not taken from a secret scope",
    ),
    # tasks
    (_set("golden", *TASK, "job_cluster_key"), "gold.gold: there is no cluster golden"),
    (
        _set("bronce", *SCHEDULED, "tasks", 1, "depends_on", 0, "task_key"),
        "depends on bronce, which is no other task",
    ),
    (
        _set("silver", *SCHEDULED, "tasks", 1, "depends_on", 0, "task_key"),
        "depends on silver, which is no other task",
    ),
    (_set("bronze", *SCHEDULED, "tasks", 2, "task_key"), "scheduled: two tasks are called bronze"),
    (_set([], *TASK, "libraries"), "gold.gold: has no wheel to run"),
    (
        _set({"package": "great-expectation"}, *CHECK, "libraries", 1, "pypi"),
        "great-expectation is not what the package asks for",
    ),
    (
        _set(["check", *CONFIG, "--until", "3"], *CHECK, "python_wheel_task", "parameters"),
        "--until",
    ),
    # commands
    (_set("waters", *WHEEL, "package_name"), "not called waters"),
    (_set("pipelines", *WHEEL, "entry_point"), "no entry point pipelines"),
    (_set(["run", "platinum", *CONFIG], *WHEEL, "parameters"), "platinum"),
    (_set(["run", "gold", "--config-file", "x"], *WHEEL, "parameters"), "--config-file"),
    (_set(["march", "gold"], *WHEEL, "parameters"), "march"),
    (
        _set(["run", "gold"], *WHEEL, "parameters"),
        "gold.gold: does not read the configuration of the bundle",
    ),
    (_set(["run", "gold", "--once", *CONFIG], *WHEEL, "parameters"), "gold.gold: ends at once"),
    (
        _set(["run", "gold", *CONFIG], *SCHEDULED, "tasks", 2, "python_wheel_task", "parameters"),
        "scheduled.gold: never ends",
    ),
    # layers
    (_drop(*GOLD), "gold has no job that runs it"),
    (_set(["run", "silver", *CONFIG], *WHEEL, "parameters"), "gold has no job that runs it"),
    (_set(["status", *CONFIG], *WHEEL, "parameters"), "gold has no job that runs it"),
    (_drop(*SCHEDULED, "tasks", 1), "the scheduled job does not run the layers in order"),
    (_drop(*SCHEDULED, "tasks", 2, "depends_on"), "scheduled.gold does not wait"),
    # triggers
    (
        _set({"quartz_cron_expression": "0 0 * * * ?", "timezone_id": "UTC"}, *GOLD, "schedule"),
        "['continuous', 'schedule']",
    ),
    (_drop(*GOLD, "continuous"), "gold has the triggers []"),
    (_set("UNPAUSED", *GOLD, "continuous", "pause_status"), "gold writes pause_status out"),
    (
        _set("PAUSED", *JOBS, "quality", "schedule", "pause_status"),
        "quality writes pause_status out",
    ),
    (_set(2, *SCHEDULED, "max_concurrent_runs"), "scheduled may run beside itself"),
    (_set(-1, *TASK, "max_retries"), "retry policy of its own"),
    (_set("small", *TASK, "environment_key"), "is serverless"),
    (_set("UNPAUSED", *VARIABLES, "scheduled", "default"), "prod: what runs by itself"),
    (_set("PAUSED", *VARIABLES, "continuous", "default"), "prod: what runs by itself"),
    (_drop("top", "targets", "dev", "variables", "continuous"), "dev: what runs by itself"),
    (_set("NO", *VARIABLES, "scheduled", "default"), "PAUSED or UNPAUSED"),
    # alerts
    (_drop(*GOLD, "health"), "gold has the health rules []"),
    (
        _set("RUN_DURATION_SECONDS", *GOLD, "health", "rules", 0, "metric"),
        "gold has the health rules",
    ),
    (
        _drop(*GOLD, "email_notifications", "on_streaming_backlog_exceeded"),
        "gold: email_notifications are not",
    ),
    (
        _set(["a@example.org"], *GOLD, "email_notifications", "on_failure"),
        "gold: email_notifications are not",
    ),
    (
        _drop(*SCHEDULED, "webhook_notifications", "on_failure"),
        "scheduled: webhook_notifications are not",
    ),
    # targets
    (_set("production", "top", "targets", "dev", "mode"), "no target dev of mode development"),
    (_drop(*PROD), "no target prod of mode production"),
    (_set(True, *PROD, "default"), "the default target is"),
    (_drop(*PROD, "run_as"), "prod does not run as the service principal"),
    (_drop(*PROD, "permissions"), "prod says nothing about permissions"),
    (
        _set("${workspace.current_user.userName}", *PROD, "permissions", 0, "user_name"),
        "prod takes whoever deploys it for a person",
    ),
    (
        _drop(*JOBS, "bronze", "tasks", 0, "libraries", 1),
        "bronze.bronze: lacks packages of the extra registry",
    ),
    (
        _drop(*PROD, "resources", "schemas", "lake", "lifecycle"),
        "prod would let schemas lake be destroyed",
    ),
    (_drop(*VARIABLES, "catalog", "default"), "dev is deployed without values for ['catalog']"),
    (
        _set("x", *VARIABLES, "operators", "default"),
        "prod is deployed without values for ['service_principal']",
    ),
    # files
    (_set(["jobs/*.yml"], "top", "include"), "include jobs/*.yml matches no file"),
    (_set(["src"], "top", "sync", "paths"), "there is no folder src"),
    (
        _set("python3 -m pip wheel .", "top", "artifacts", "watersmeet", "build"),
        "not built into dist",
    ),
    (_set([{"whl": "dist/*.whl"}], *TASK, "libraries"), "not where the wheel is built"),
]


@pytest.mark.parametrize(("change", "problem"), PLANTED, ids=[problem for _, problem in PLANTED])
def test_a_broken_bundle_is_noticed(bundle: Bundle, change: Change, problem: str) -> None:
    change(bundle)
    assert [found for found in bundle.problems() if problem in found], bundle.problems()
