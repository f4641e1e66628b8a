"""The wheel in an empty environment, with the newest packages that it allows: what is missing is
said, and the demo runs on both engines.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.installed import Environment, build_wheel
from tests.support.packaging import extras
from watersmeet.jvm.artifacts import BROKER, SPARK, pinned

CHECKED = [
    *["bronze_tracking"] * 4,
    *["bronze_orders"] * 4,
    *["merged", "merged", "late", "sink", "progress"],
]
"""The tables in the demo's check, a line for each suite."""

pytestmark = pytest.mark.promise("A19")


class Installed:
    """The wheel in an environment, where nothing else is, and its command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = build_wheel(folder)
        self.cache = folder / "cache"
        self.environment = Environment.make(folder / "environment")

    def install(self, *extras: str) -> None:
        self.environment.pip(f"{self.wheel}[{','.join(extras)}]" if extras else str(self.wheel))

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.environment.run("python", "-c", code, cwd=self.folder)

    def watersmeet(self, *arguments: str, exit_code: int = 0) -> str:
        """What a command says on standard output, or where it fails as it should, on standard
        error."""
        done = self.environment.run(
            "watersmeet",
            *arguments,
            cwd=self.folder,
            variables={"XDG_CACHE_HOME": str(self.cache)},
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stderr if exit_code else done.stdout


@pytest.mark.nightly
def test_the_wheel_alone_says_what_it_lacks_and_with_a_broker_runs_the_demo(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install()
    assert json.loads(installed.watersmeet("init", "shop", "--json"))["engine"] == "embedded"
    assert "engine: embedded" in (tmp_path / "shop" / "watersmeet.yml").read_text()
    said = installed.watersmeet("broker", "start", exit_code=1)
    assert '`pip install "watersmeet[broker]"`' in said
    assert [name for name in pinned(BROKER) if name not in said] == []

    installed.install("broker")
    assert installed.python("import pyspark").returncode == 1
    quick = installed.watersmeet("demo", "--engine", "embedded", "--dir", "quick")
    assert "(142 messages)" in quick
    assert '`pip install "watersmeet[quality]"`' in quick


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_wheel_with_its_extras_runs_the_demo_on_both_engines(tmp_path: Path) -> None:
    installed = Installed(tmp_path)
    installed.install(*(name for name in extras() if name != "connect"))
    installed.watersmeet("fetch")
    jars = (installed.cache / "watersmeet" / "jars").rglob("*.jar")
    assert sorted(file.name for file in jars) == sorted([*pinned(SPARK), *pinned(BROKER)])
    assert json.loads(installed.watersmeet("init", "large", "--json"))["engine"] == "embedded"
    shown = {
        engine: installed.watersmeet("demo", "--engine", engine, "--dir", engine)
        for engine in ("embedded", "spark")
    }
    results = {
        engine: text.partition("What the data is expected to be")[0]
        for engine, text in shown.items()
    }
    assert "(142 messages)" in results["spark"]
    assert results["embedded"] == results["spark"]
    for text in shown.values():
        after = text.partition("Great Expectations")[2]
        lines = after.splitlines()
        [header] = [n for n, line in enumerate(lines) if line.split()[:2] == ["table", "suite"]]
        end = lines.index("every expectation is met")
        assert [line.split()[0] for line in lines[header + 1 : end]] == CHECKED
    [reading] = [line for line in shown["embedded"].splitlines() if "/python -c " in line]
    read = installed.python(reading.partition(" -c ")[2].strip().strip('"'))
    assert "merge_key" in read.stdout, read.stderr
    installed.watersmeet("report", "--out", "report.html", "-c", "spark/watersmeet.yml")
