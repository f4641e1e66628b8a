"""The wheel in an empty environment, with the newest packages that it allows: what is missing is
said, and the demo runs on both engines.
"""

from __future__ import annotations

import json
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

pytestmark = [pytest.mark.promise("A19"), pytest.mark.long]


@pytest.mark.timeout(1500)
def test_the_wheel_alone_says_what_it_lacks_and_with_its_extras_runs_the_demo_on_both_engines(
    tmp_path: Path,
) -> None:
    wheel, cache = build_wheel(tmp_path), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment = Environment.make(tmp_path / "environment")

    def watersmeet(*arguments: str, exit_code: int = 0, **variables: str) -> str:
        """What a command says on standard output, or where it fails as it should, on standard
        error."""
        done = environment.run(
            "watersmeet", *arguments, cwd=tmp_path, variables={**cache, **variables}
        )
        assert done.returncode == exit_code, done.stdout + done.stderr
        return done.stderr if exit_code else done.stdout

    environment.pip(str(wheel))
    assert json.loads(watersmeet("init", "shop", "--json"))["engine"] == "embedded"
    assert "engine: embedded" in (tmp_path / "shop" / "watersmeet.yml").read_text()
    said = watersmeet("broker", "start", exit_code=1)
    assert '`pip install "watersmeet[broker]"`' in said
    assert [name for name in pinned(BROKER) if name not in said] == []

    environment.pip(f"{wheel}[broker]")
    assert environment.run("python", "-c", "import pyspark", cwd=tmp_path).returncode == 1
    quick = watersmeet("demo", "--engine", "embedded", "--dir", "quick")
    assert "(142 messages)" in quick
    assert '`pip install "watersmeet[quality]"`' in quick

    environment.pip(f"{wheel}[{','.join(name for name in extras() if name != 'connect')}]")
    watersmeet("fetch")
    assert sorted(
        file.name for file in (tmp_path / "cache" / "watersmeet" / "jars").rglob("*.jar")
    ) == sorted([*pinned(SPARK), *pinned(BROKER)])
    assert json.loads(watersmeet("init", "large", "--json"))["engine"] == "embedded"
    shown = {
        engine: watersmeet("demo", "--engine", engine, "--dir", engine)
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
        assert "every expectation is met" in after
        assert [line.split()[0] for line in after.splitlines() if line.startswith(" ")][
            1 : len(CHECKED) + 1
        ] == CHECKED
    [reading] = [line for line in shown["embedded"].splitlines() if "/python -c " in line]
    read = environment.run(
        "python", "-c", reading.partition(" -c ")[2].strip().strip('"'), cwd=tmp_path
    )
    assert "merge_key" in read.stdout, read.stderr
    watersmeet("report", "--out", "report.html", "-c", "spark/watersmeet.yml")
