"""Dependencies point inward: wiring -> adapters and transforms -> core."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pipelines"
WIRING = frozenset(f"pipelines.{name}" for name in ("bronze", "silver", "gold", "run", "audit", "cli", "demo"))
SPARK = frozenset(["pyspark", "delta"])
CLOCKS = frozenset(
    [
        *("datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.time", "time.time_ns"),
        *("time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.sleep"),
        *("F.now", "F.current_timestamp", "F.current_date", "F.localtimestamp", "F.curdate", "F.unix_timestamp()"),
    ]
)
STREAMS = frozenset(["readStream", "writeStream", "foreachBatch"])


@dataclass(frozen=True)
class Layer:
    """What the modules of a folder may not import (a module stands for all in it), call or mention."""

    imports: frozenset[str]
    calls: frozenset[str] = frozenset()
    mentions: frozenset[str] = frozenset()


LAYERS = {
    "pipelines.core": Layer(
        SPARK | WIRING | {"confluent_kafka", "pipelines.adapters", "pipelines.transforms", "pipelines.settings"},
        calls=CLOCKS,
    ),
    "pipelines.transforms": Layer(
        WIRING | {"confluent_kafka", "delta", "pyspark.sql.streaming", "pipelines.adapters", "pipelines.streaming"},
        calls=CLOCKS,
        mentions=STREAMS | {"SparkSession", "sparkSession"},
    ),
    "pipelines.adapters": Layer(WIRING | {"pipelines.transforms"}),
}
"""`pipelines.tables` and `pipelines.settings` are facts that adapters and transforms share."""


def violations(module: str, text: str) -> list[str]:
    """What a module's text does that its layer forbids; `module` is its dotted name."""
    layer = next((layer for name, layer in LAYERS.items() if f"{module}.".startswith(f"{name}.")), None)
    if layer is None:
        return []
    tree = ast.parse(text)
    imported = {name for node in ast.walk(tree) for name in _imported(node, module)}
    forbidden = [f"imports {name}" for name in imported if any(f"{name}.".startswith(f"{bad}.") for bad in layer.imports)]
    called = {_call(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    forbidden += [f"calls {name}" for name in layer.calls if any(f".{call}".endswith(f".{name}") for call in called)]
    mentioned = {name for node in ast.walk(tree) for name in _mentioned(node)}
    forbidden += [f"mentions {name}" for name in mentioned & layer.mentions]
    return sorted(forbidden)


def _imported(node: ast.AST, module: str) -> Iterator[str]:
    """`from a import b` may mean the module a.b, so it counts as that."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = ".".join(module.split(".")[: -node.level]) + "." if node.level else ""
        origin = package + (node.module or "")
        yield from (f"{origin.rstrip('.')}.{alias.name}" for alias in node.names)


def _call(node: ast.Call) -> str:
    """The dotted name that is called, and `()` where nothing is passed to what reads the clock only then."""
    name = ast.unparse(node.func)
    return f"{name}()" if name.endswith("unix_timestamp") and not node.args else name


def _mentioned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.name


def modules(layer: str) -> dict[str, str]:
    """The texts of a layer's modules by their dotted names."""
    folder = PACKAGE.parent / layer.replace(".", "/")
    return {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path.read_text() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("layer", LAYERS)
def test_dependencies_point_inward(layer: str) -> None:
    found = {module: violations(module, text) for module, text in modules(layer).items()}
    assert len(found) >= 5
    assert {module: broken for module, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("pipelines.core.a", "import pyspark.sql", ["imports pyspark.sql"]),
        ("pipelines.core.a", "from delta.tables import DeltaTable", ["imports delta.tables.DeltaTable"]),
        ("pipelines.core.a", "def f():\n    import confluent_kafka", ["imports confluent_kafka"]),
        ("pipelines.core.a", "from pipelines import transforms", ["imports pipelines.transforms"]),
        ("pipelines.core.a", "from ..adapters import lake", ["imports pipelines.adapters.lake"]),
        ("pipelines.core.a", "import datetime\nx = datetime.datetime.now()", ["calls datetime.now"]),
        ("pipelines.core.a", "import time\nx = time.time()", ["calls time.time"]),
        ("pipelines.transforms.a", "from pipelines.adapters.lake import Lake", ["imports pipelines.adapters.lake.Lake"]),
        (
            "pipelines.transforms.a",
            "from pyspark.sql import SparkSession",
            ["mentions SparkSession"],
        ),
        ("pipelines.transforms.a", "def f(rows): return rows.writeStream", ["mentions writeStream"]),
        ("pipelines.transforms.a", "def f(rows): return rows.sparkSession.conf", ["mentions sparkSession"]),
        ("pipelines.transforms.a", "x = F.current_timestamp()", ["calls F.current_timestamp"]),
        ("pipelines.transforms.a", "x = F.unix_timestamp()", ["calls F.unix_timestamp()"]),
        ("pipelines.adapters.a", "from pipelines import bronze, tables", ["imports pipelines.bronze"]),
        ("pipelines.adapters.a", "from ..audit.status import status", ["imports pipelines.audit.status.status"]),
        ("pipelines.adapters.a", "if TYPE_CHECKING:\n    import pipelines.cli", ["imports pipelines.cli"]),
    ],
)
def test_the_checker_sees_what_is_forbidden(module: str, text: str, expected: list[str]) -> None:
    assert violations(module, text) == expected


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("pipelines.core.a", "import numpy\nfrom pipelines.errors import ConfigurationError\nfrom . import plan"),
        ("pipelines.core.a", "from datetime import date\nx = date(2026, 1, 1)"),
        ("pipelines.transforms.a", "from pyspark.sql import functions as F\nx = F.unix_timestamp('event_time')"),
        ("pipelines.transforms.a", "from pipelines.settings import PublishSettings\nfrom pipelines.core import plan"),
        ("pipelines.adapters.a", "import time\nfrom pyspark.sql import SparkSession\nx = time.time()"),
        ("pipelines.adapters.a", "from pipelines import bronzed"),
        ("pipelines.bronze", "from pipelines.adapters.lake import Lake"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(module: str, text: str) -> None:
    assert violations(module, text) == []


def test_the_command_line_is_ready_without_spark_and_kafka() -> None:
    heavy = {"pyspark", "delta", "pyarrow", "pandas", "confluent_kafka", "great_expectations"}
    script = f"import sys, pipelines.cli; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
