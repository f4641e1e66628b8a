"""The commands of docs/spark-clusters.md as a user types them: what executors need is built, and a
run submitted to a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.standalone import HOME, QUICK, environment

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spark-clusters.md"
JARS = sorted(Path(sys.prefix, "jars", "spark").glob("*.jar"))
BARE_PYTHON = str(
    Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
)
"""The interpreter that the test run's own environment is made from: it has none of the packages."""

SMALL = [
    "--driver-memory",
    "1g",
    "--conf",
    "spark.executor.memory=700m",
    "--conf",
    "spark.sql.shuffle.partitions=2",
]


def blocks(language: str) -> list[str]:
    """The page's examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@dataclass(frozen=True)
class Submission:
    """What the page's first commands have made in `folder`: the archive for the executors, and the
    entry script."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> Submission:
        """Runs them in a copy of what a clone has."""
        for name in ("pipelines", "schemas"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        variables = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PIP_NO_COMPILE": "1",
        }
        subprocess.run(
            ["bash", "-euc", blocks("bash")[0]],
            cwd=folder,
            env=variables,
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "watersmeet_job.py").write_text(blocks("python")[0])
        return cls(folder)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of `spark-submit`; of Python's own only what the command says."""
        return environment() | {"PYTHONPATH": str(self.folder / "environment")}

    def command(self, master: str, *more: str, python: str = BARE_PYTHON) -> list[str]:
        """`spark-submit` up to the entry script, as the page has it for a Spark without Maven, with
        `more` options."""
        words = shlex.split(blocks("bash")[1].replace("\\\n", " "))
        assert words[:2] == ["PYTHONPATH=environment", "spark-submit"]
        options = words[2 : words.index("watersmeet_job.py")]
        packages = options.index("--packages")
        delta = next(str(jar) for jar in JARS if jar.name.startswith("delta-spark"))
        options[packages : packages + 2] = ["--jars", ",".join(map(str, JARS)), "--py-files", delta]
        here = {
            "spark://host:7077": master,
            "environment.tar.gz#environment": f"{self.folder / 'environment.tar.gz'}#environment",
            "spark.pyspark.python=python3": f"spark.pyspark.python={python}",
        }
        quick = [
            "--conf",
            f"spark.driver.extraJavaOptions={QUICK}",
            "--conf",
            f"spark.executor.extraJavaOptions={QUICK}",
        ]
        options = [here.get(word, word) for word in options]
        return [
            str(HOME / "bin" / "spark-submit"),
            *options,
            *SMALL,
            *quick,
            *more,
            str(self.folder / "watersmeet_job.py"),
        ]
