"""Dependencies point inward: layers -> engine, kafka, lake -> core. Every module has a room, and
imports of imports count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pipelines" / "watersmeet"

ROOMS: Mapping[str, tuple[str, ...]] = {
    "facts": (
        "watersmeet",
        "configuration",
        "errors",
        "faults",
        "imports",
        "jvm",
        "memory",
        "monitoring",
        "output",
        "settings",
    ),
    "core": ("core",),
    "lake": ("lake",),
    "expressions": ("expressions",),
    "kafka": ("kafka",),
    "engine": ("engine",),
    "layers": ("bronze", "cycle", "gold", "operations", "repartition", "run", "running", "silver"),
    "audit": ("ask", "audit"),
    "views": ("live", "quality"),
    "dev": ("avro_json", "dev", "dry_run"),
    "cli": ("__main__", "cli", "commands"),
}
"""Each room's modules, and packages with all that is in them."""

OPEN_TO: Mapping[str, frozenset[str]] = {
    "core": frozenset(),
    "facts": frozenset(["core"]),
    "expressions": frozenset(["core", "facts"]),
    "lake": frozenset(["core", "facts"]),
    "kafka": frozenset(["core", "facts"]),
    "engine": frozenset(["core", "facts", "lake", "kafka", "expressions"]),
    "layers": frozenset(["core", "facts", "lake", "kafka", "engine", "expressions"]),
    "audit": frozenset(["core", "facts", "lake", "kafka", "engine", "expressions"]),
    "views": frozenset(["core", "facts", "lake", "kafka", "engine", "audit"]),
    "dev": frozenset(
        ["core", "facts", "lake", "kafka", "engine", "expressions", "layers", "audit", "views"]
    ),
    "cli": frozenset(
        ["core", "facts", "lake", "kafka", "engine", "layers", "audit", "views", "dev"]
    ),
}
"""The other rooms that a room may import from."""

# A schema that cannot be a column's type is an error in the configuration.
EXCEPTIONS = frozenset(
    [
        (
            "core.json_schema",
            "errors",
        ),
        ("run", "audit.validate"),  # a start checks what `validate` checks
        ("operations.evolve", "audit.validate"),
        ("run", "live"),  # a start makes the views of a catalog
        ("lake.maintenance", "engine"),  # its type alone
        ("audit.rebuild", "running.owner"),  # a rebuild is silver again, and nobody's word on it
        ("audit.rebuild", "silver"),
        ("audit.validate", "running.generations"),  # what a run would read
        ("audit.validate", "running.next_offsets"),  # and whether it would
        ("run", "quality.beside"),  # checks beside the stream
        ("quality.beside", "running.owner"),  # the wall clock
        ("quality.page", "running.owner"),
        ("quality.suites", "dev.init"),  # the folder of Watersmeet's own suites
    ]
)
"""Single imports that are allowed all the same, and why."""

SPARK = frozenset(["pyspark", "delta", "py4j"])
OUTSIDE = SPARK | {"deltalake", "confluent_kafka"}
PRIVATE = frozenset(
    [
        "_jvm",
        "_jdt",
        "_jsc",
        "_jdf",
        "_jc",
        "_jq",
        "_sc",
        "_jsparkSession",
        "_jwrite",
        "_jreader",
        "_gateway",
        "_gateway_client",
    ]
)
UNSUPPORTED = frozenset(["sparkContext", "newSession"])
CLOCKS = frozenset(
    [
        *(
            "datetime.now",
            "datetime.utcnow",
            "datetime.today",
            "date.today",
            "time.time",
            "time.time_ns",
        ),
        *("time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.sleep"),
    ]
)


@dataclass(frozen=True)
class Package:
    """Modules by their dotted name without `watersmeet.` (the package itself: `watersmeet`), and
    what they import."""

    texts: Mapping[str, str]

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(text) for name, text in self.texts.items()}

    def room(self, module: str) -> str | None:
        return next(
            (room for room, parts in ROOMS.items() if module.partition(".")[0] in parts), None
        )

    def imports(self, module: str, *, at_import: bool = False) -> set[str]:
        """The modules of this package, and the other packages, that a module names in its imports:
        in functions, too, and for types alone; or only those that importing it imports.
        """
        nodes = _run_at_import(self.trees[module]) if at_import else ast.walk(self.trees[module])
        found = {self._module(name) for node in nodes for name in _imported(node, module)}
        return found - {module}

    def reaches(
        self, module: str, *, at_import: bool = False, cut: frozenset[tuple[str, str]] = frozenset()
    ) -> set[str]:
        """All of the same, with the imports of what is imported; `cut`: imports that do not
        count."""
        seen: set[str] = set()
        ahead = [module]
        while ahead:
            here = ahead.pop()
            packages = {here.rpartition(".")[0]} & self.texts.keys()
            found = (
                self.imports(here, at_import=at_import) | packages if here in self.texts else set()
            )
            new = {name for name in found - seen - {module} if (here, name) not in cut}
            seen |= new
            ahead += new
        return seen

    def _module(self, name: str) -> str:
        """`from a import b` may mean the module a.b, so the longest name that is a module
        counts."""
        if name.partition(".")[0] != "watersmeet":
            return name.partition(".")[0]
        inner = name.partition(".")[2]
        while inner and inner not in self.texts:
            inner = inner.rpartition(".")[0]
        return inner or "watersmeet"

    def wrong_imports(self) -> list[str]:
        """Every import from a room that is not open to the module's own."""
        wrong = []
        for module in self.texts:
            here = self.room(module)
            for imported in self.imports(module):
                there = self.room(imported)
                if imported in self.texts and here is not None and there is not None:
                    is_open = there in OPEN_TO[here] | {here} or imported == "watersmeet"
                    if not is_open and (module, imported) not in EXCEPTIONS:
                        wrong.append(f"{module} imports {imported}")
        return sorted(wrong)

    @cached_property
    def own_names(self) -> frozenset[str]:
        """What the package itself defines, as a function, a class or an attribute."""
        names = set()
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    names.add(node.name)
                elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(
                    node.ctx, ast.Store
                ):
                    names.add(node.id if isinstance(node, ast.Name) else node.attr)
        return frozenset(names)

    def foreign_private_names(self, module: str) -> set[str]:
        """Names with a leading underscore that a module takes from others, and what Spark does not
        support everywhere.

        What a named tuple has is public, and so are librdkafka's own error codes.
        """
        public = {"_asdict", "_fields", "_make", "_replace"}
        found = set()
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Attribute):
                is_code = isinstance(node.value, ast.Name) and node.value.id == "KafkaError"
                is_private = (
                    node.attr.startswith("_")
                    and not node.attr.startswith("__")
                    and node.attr not in public
                )
                if node.attr in PRIVATE | UNSUPPORTED or (
                    is_private and not is_code and node.attr not in self.own_names
                ):
                    found.add(node.attr)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value in PRIVATE
            ):
                found.add(node.value)
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(
                "watersmeet"
            ):
                found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        return found


def _imported(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = (
            ".".join(f"watersmeet.{module}".split(".")[: -node.level]) + "." if node.level else ""
        )
        origin = (package + (node.module or "")).rstrip(".")
        yield from (f"{origin}.{alias.name}" for alias in node.names)


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that is reached when the module is imported: no body of a function, and nothing
    that is for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _run_at_import(node)


def _called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def _read(package: Path) -> Package:
    texts = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts[name or "watersmeet"] = path.read_text(encoding="utf-8")
    return Package(texts)


@pytest.fixture(scope="module")
def package() -> Package:
    return _read(PACKAGE)


# -- the laws


def test_every_module_has_a_room_and_every_room_its_modules(package: Package) -> None:
    assert [module for module in package.texts if package.room(module) is None] == []
    known = {module.partition(".")[0] for module in package.texts}
    assert [part for parts in ROOMS.values() for part in parts if part not in known] == []


def test_dependencies_point_inward(package: Package) -> None:
    assert package.wrong_imports() == []


def test_every_exception_is_needed(package: Package) -> None:
    assert [pair for pair in EXCEPTIONS if pair[1] not in package.imports(pair[0])] == []


def test_the_core_knows_neither_spark_nor_kafka_nor_delta_nor_the_time(package: Package) -> None:
    core = [module for module in package.texts if package.room(module) == "core"]
    assert len(core) > 10
    assert {module: found for module in core if (found := package.reaches(module) & OUTSIDE)} == {}
    told = {
        module: {
            call for call in _called(package.trees[module]) if any(call.endswith(c) for c in CLOCKS)
        }
        for module in core
    }
    assert {module: calls for module, calls in told.items() if calls} == {}


def test_spark_is_imported_only_by_what_works_with_it(package: Package) -> None:
    by_spark = {
        "engine.catalog",
        "engine.class_archive",
        "engine.spark",
        "engine.spark_writer",
        "engine.session",
        "engine.checks",
        "engine.expressions",
        "engine.jvm",
        "lake.by_spark",
    }
    above = {"live", "quality", "run", "dev.demo"}
    found = {module for module in package.texts if package.reaches(module, at_import=True) & SPARK}
    assert found <= by_spark | above


def test_what_verify_says_does_not_rest_on_the_merge_that_it_checks(package: Package) -> None:
    """Of the layers it knows nothing, and of `core.merge` and `core.corrections` only the columns,
    which the layout of tables and views takes from there."""
    checks = [module for module in package.texts if module.startswith("audit.verify")]
    assert checks
    derived = {"core.merge", "core.corrections"}
    layout = frozenset(
        (columns, module) for columns in ("lake.tables", "lake.views") for module in derived
    )
    for module in checks:
        reached = package.reaches(module, cut=layout)
        assert not derived & reached, module
        assert [
            name for name in reached if package.room(name) in ("layers", "engine", "cli")
        ] == [], module


def test_nothing_is_used_that_others_keep_for_themselves(package: Package) -> None:
    assert {
        module: names
        for module in package.texts
        if (names := package.foreign_private_names(module))
    } == {}


def test_an_arrow_array_of_python_values_has_a_type(package: Package) -> None:
    """Of nothing it would have none, and Spark takes no column without."""
    python_values = (ast.List, ast.ListComp, ast.GeneratorExp, ast.Tuple)
    makers = {"range", "list", "map", "sorted", "zip", "tuple"}

    def is_of_python_values(node: ast.expr) -> bool:
        is_made = isinstance(node, ast.Call) and ast.unparse(node.func) in makers
        return is_made or isinstance(node, python_values)

    found = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in package.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "pa.array"
        and len(node.args) + len(node.keywords) == 1
        and is_of_python_values(node.args[0])
    ]
    assert found == []


def test_what_guards_data_is_never_an_assertion(package: Package) -> None:
    found = [
        module
        for module, tree in package.trees.items()
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    ]
    assert found == []


def test_the_command_line_is_ready_without_spark_and_kafka() -> None:
    heavy = {
        "pyspark",
        "delta",
        "deltalake",
        "pyarrow",
        "pandas",
        "confluent_kafka",
        "great_expectations",
    }
    script = f"import sys, watersmeet.cli; print(*sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


# -- the checker


def of(**texts: str) -> Package:
    """A package of these modules (`__` for a dot), beside some that import nothing."""
    empty = dict.fromkeys(
        [
            "watersmeet",
            "core",
            "core.plan",
            "core.merge",
            "lake",
            "lake.tables",
            "engine",
            "bronze",
            "cli",
        ],
        "",
    )
    return Package({**empty, **{name.replace("__", "."): text for name, text in texts.items()}})


@pytest.mark.parametrize(
    ("module", "text", "wrong"),
    [
        ("core.a", "from watersmeet.lake import tables", "core.a imports lake.tables"),
        ("core.a", "def f():\n    import watersmeet.bronze", "core.a imports bronze"),
        ("core.a", "from ..lake import tables", "core.a imports lake.tables"),
        ("core.a", "from watersmeet.lake.tables import SILVER", "core.a imports lake.tables"),
        ("core.a", "if TYPE_CHECKING:\n    import watersmeet.engine", "core.a imports engine"),
        ("lake.a", "from watersmeet import bronze, core", "lake.a imports bronze"),
        ("kafka.a", "from watersmeet.lake import tables", "kafka.a imports lake.tables"),
        ("engine.a", "from watersmeet.bronze import Bronze", "engine.a imports bronze"),
        ("gold", "import watersmeet.cli", "gold imports cli"),
        ("audit.a", "from watersmeet.bronze import Bronze", "audit.a imports bronze"),
    ],
)
def test_the_checker_sees_an_import_that_points_outward(module: str, text: str, wrong: str) -> None:
    assert of(**{module: text}).wrong_imports() == [wrong]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("core.a", "import numpy\nfrom . import plan\nfrom watersmeet.core.merge import merge"),
        (
            "lake.a",
            "from watersmeet.core import plan\nfrom watersmeet import __version__\n"
            "import watersmeet",
        ),
        ("engine.a", "from watersmeet.lake import tables\nimport pyspark"),
        ("gold", "from watersmeet.engine import Engine\nfrom watersmeet.lake.tables import SILVER"),
        ("cli", "from watersmeet.bronze import Bronze"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(module: str, text: str) -> None:
    assert of(**{module: text}).wrong_imports() == []


def test_the_checker_follows_imports_of_imports() -> None:
    package = of(
        core__a="from watersmeet.core import b",
        core__b="def f():\n    from watersmeet.core.c import x",
        core__c="if TYPE_CHECKING:\n    import delta.tables\nimport pyarrow",
    )
    assert package.reaches("core.a") >= {"core.b", "core.c", "delta", "pyarrow"}
    assert package.reaches("core.a", at_import=True) == {"core", "core.b"}
    assert package.reaches("core.b", at_import=True) == {"core"}
    assert package.reaches("core.a", cut=frozenset([("core.b", "core.c")])) == {"core", "core.b"}


def test_importing_a_module_imports_its_packages() -> None:
    package = of(core="import pyspark", core__a="", lake__a="import watersmeet.core.a")
    assert "pyspark" in package.reaches("lake.a", at_import=True)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("x = spark._jvm.java", {"_jvm"}),
        ("x = getattr(spark, '_jsparkSession')", {"_jsparkSession"}),
        ("x = spark.sparkContext", {"sparkContext"}),
        ("x = frame.sparkSession.newSession()", {"newSession"}),
        ("from pyspark.sql.utils import _secret", {"_secret"}),
        ("x = table._table.history()", {"_table"}),
        (
            "class A:\n    def __init__(self):\n        self._own = 1\n    def f(self, other):\n   "
            "     return other._own",
            set(),
        ),
        ("x = KafkaError._TRANSPORT\ny = row._asdict()\nz = a.__class__", set()),
    ],
)
def test_the_checker_sees_what_others_keep_for_themselves(text: str, names: set[str]) -> None:
    assert of(engine__a=text).foreign_private_names("engine.a") == names
