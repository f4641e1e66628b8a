"""The oldest packages that the wheel allows, below everything that the tests themselves need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.installed import Environment
from tests.support.packaging import ROOT, dependencies, extras, lower_bounds

pytestmark = [pytest.mark.promise("A19"), pytest.mark.long]

VERSIONS = (
    "import json, sys; from importlib.metadata import version; print(json.dumps([version(name) for "
    "name in sys.argv[1:]]))"
)
LAYERS = ("test_bronze", "test_silver", "test_gold", "test_restarts", "test_sinks_made_again")
"""The laws of the layers, of restarts, and of topics that are made again."""
OF_EXTRAS = (
    *(
        "tests/quality",
        "tests/ask/test_report_page.py",
        "tests/unit/test_monitoring.py",
        "tests/integration/test_monitoring.py",
    ),
    *(
        "tests/integration/test_lineage.py",
        "tests/kafka/test_registry.py",
        "tests/dev/test_secure.py",
    ),
)


def run_with_oldest(
    folder: Path,
    requirements: Iterable[Requirement],
    tests: Sequence[str],
    which: str = "not nightly",
) -> None:
    """Run tests that need no Spark session with the oldest packages; whatever else is imported
    comes from this environment."""
    environment, bounds = Environment.make(folder), lower_bounds(requirements)
    environment.pip(*(f"{name}=={bound}" if bound else name for name, bound in bounds.items()))
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "tests.pth").write_text(
        f"{ROOT}\n{ROOT / 'pipelines'}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8"
    )
    (folder / "jars").symlink_to(Path(sys.prefix, "jars"))
    said = environment.run("python", "-c", VERSIONS, *bounds, cwd=ROOT)
    for (name, bound), version in zip(bounds.items(), json.loads(said.stdout), strict=True):
        assert not bound or Version(version) == Version(bound), name
    chosen = ["-k", "not spark", "-m", which, *tests]
    command = [
        str(environment.python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *chosen,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=3400, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_with_the_oldest_packages_that_the_wheel_allows_the_laws_of_the_layers_hold(
    tmp_path: Path,
) -> None:
    laws = [f"tests/laws/{name}.py" for name in LAYERS]
    run_with_oldest(tmp_path / "oldest", dependencies(), laws, "not long and not nightly")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_with_the_oldest_packages_that_the_wheel_allows_all_laws_hold(tmp_path: Path) -> None:
    run_with_oldest(tmp_path / "oldest", dependencies(), ["tests/laws"])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_with_the_oldest_packages_of_the_extras_they_do_what_they_are_for(tmp_path: Path) -> None:
    """All but Spark and Delta Lake, which belong to the JVM artifacts and have one version."""
    asked = [
        each
        for each in chain(dependencies(), *extras().values())
        if each.name not in ("pyspark", "delta-spark")
    ]
    run_with_oldest(tmp_path / "oldest", asked, OF_EXTRAS)
