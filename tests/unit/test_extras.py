"""What the wheel asks for: what the code imports is a dependency, or an extra brings it, which is
named where it is missing."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.packaging import ROOT, dependencies, extras, lower_bounds, pinned
from tests.unit.test_cli import config
from watersmeet import cli
from watersmeet.engine.choice import open_engine
from watersmeet.errors import EXTRAS, MissingPackageError
from watersmeet.jvm.artifacts import SPARK
from watersmeet.jvm.artifacts import pinned as pinned_artifacts
from watersmeet.settings import load_settings

pytestmark = pytest.mark.promise("A19")

MODULES: dict[str, set[str]] = {}
"""By package of an index, the names under which it is imported."""
for module, packages in packages_distributions().items():
    for package in packages:
        MODULES.setdefault(canonicalize_name(package), set()).add(module)


def modules(names: list[str]) -> set[str]:
    return set().union(*(MODULES[canonicalize_name(name)] for name in names))


def imported() -> set[str]:
    """The packages of others that the code imports, in functions, too."""
    found = set()
    for path in (ROOT / "pipelines" / "watersmeet").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"watersmeet"}


def test_every_package_that_is_imported_is_a_dependency_or_an_extras() -> None:
    # By pyspark, and by confluent-kafka's client of registries in versions before.
    brought = {
        "py4j",
        "httpx",
    }
    assert imported() - modules([each.name for each in dependencies()]) - EXTRAS.keys() <= brought


def test_every_package_of_an_extra_is_said_to_be_that_extras() -> None:
    always = modules([each.name for each in dependencies()])
    for extra, requirements in extras().items():
        for module in modules([each.name for each in requirements]) - always:
            assert module in EXTRAS, f"{extra} brings it"
    for module, extra in EXTRAS.items():
        brought = {
            name for each in extras()[extra] for name in MODULES[canonicalize_name(each.name)]
        }
        assert module in brought or (
            extra == "connect" and module in ("grpc", "grpc_status", "google", "zstandard")
        )


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_a_package_that_is_missing_is_said_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(cli, "app", lambda **_: importlib.import_module(package))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = (
        f'the package {package} is not installed: `pip install "watersmeet[{EXTRAS[package]}]"` '
        "brings it"
    )
    assert (ended.value.code, capsys.readouterr().err) == (2, f"watersmeet: {said}\n")


def test_without_spark_another_engine_is_offered_where_spark_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(
        MissingPackageError,
        match=r'`pip install "watersmeet\[spark\]"` brings it, or take `engine: embedded`',
    ):
        open_engine(load_settings(config(tmp_path)))


def test_the_python_half_of_delta_lake_is_that_of_the_jvm_artifact() -> None:
    [revision] = [
        artifact.version
        for artifact in pinned_artifacts(SPARK).values()
        if artifact.module.startswith("delta-spark_")
    ]
    asked = {
        str(each.specifier)
        for each in chain.from_iterable(extras().values())
        if each.name == "delta-spark"
    }
    assert asked == {f"=={revision}"}
    assert pinned()["delta-spark"] == revision


def test_the_oldest_delta_rs_is_the_one_that_silver_was_read_with() -> None:
    """Versions before 1.6.6 read large tables with deletion vectors wrongly
    (`tests/integration/test_other_readers.py`)."""
    assert lower_bounds(dependencies())["deltalake"] == pinned()["deltalake"]


def test_what_is_pinned_here_is_what_the_wheel_allows() -> None:
    for each in chain(dependencies(), *extras().values()):
        if each.name in pinned():
            assert each.specifier.contains(pinned()[each.name]), each
