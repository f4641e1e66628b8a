"""The laws of the notebooks: each runs from top to bottom on a lake of any sources, only reads, and is stored without outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from pyspark.sql import SparkSession

from pipelines.adapters.spark import layer_session
from tests.support.cases import random_case
from tests.support.lakes import CaseLake, settings_for

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))
SOURCES = ("clicks", "orders", "refunds")
SEEDS = (9, 15, 16)  # partition 1 has no clock; all three together have records of every kind

MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])(/(home|Users|root|tmp|work|var|mnt|opt|srv|data|dbfs|Volumes|Workspace)\b|~/|[A-Za-z]:\\)"
    r"|\b(dbfs|file|s3a?|gs|abfss?|wasbs?)://?\w"
)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def lake(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources, which no notebook can have heard of; open and timed-out records, a partition without a clock."""
    settings = settings_for(tmp_path_factory.mktemp("notebooks"), sources=SOURCES, publish__valid="size(orders) > 0")
    cases = {partition: random_case(seed, sources=SOURCES) for partition, seed in enumerate(SEEDS)}
    case_lake = CaseLake(layer_session(root_session), settings, cases)
    case_lake.arrive()
    case_lake.merge()
    silver = case_lake.silver()
    assert {row[2] for row in silver} == {"open", "timed_out"}
    assert any(all(row[5:]) for row in silver)
    assert any(case.merged(SOURCES).clock is None for case in cases.values())
    return Path(str(settings.lake))


@pytest.fixture
def _own_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own files go where they do not pile up."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def execute(notebook: Any, folder: Path) -> None:
    """Runs the cells in a kernel of this Python, with a Spark of its own; no process of it is left behind."""
    client = NotebookClient(notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}})
    before = set(psutil.Process().children(recursive=True))
    started: set[psutil.Process] = set()
    names: list[str] = []
    try:
        with client.setup_kernel():
            try:
                for index, cell in enumerate(notebook.cells):
                    client.execute_cell(cell, index)
            finally:
                started = set(psutil.Process().children(recursive=True)) - before
                names = [process.name() for process in started]
    finally:
        _, alive = psutil.wait_procs(list(started), timeout=60)
        for process in alive:
            process.kill()
    assert any("java" in name for name in names), names
    assert alive == []


def shown(notebook: Any) -> str:
    """All that the cells have shown, as plain text."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "\n".join(output["data"]["text/plain"] if "data" in output else output.get("text", "") for output in outputs)


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_there_are_notebooks() -> None:
    assert "01_explore_silver.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.usefixtures("_own_jupyter")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_lake_of_any_sources_and_only_reads(
    path: Path, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATERSMEET_LAKE", str(lake))
    before = contents(lake)
    notebook = read(path)
    execute(notebook, tmp_path)
    assert contents(lake) == before
    for cell in code_cells(notebook):
        assert cell.outputs, f"shows nothing: {cell.source}"
        assert "stream" not in [output.output_type for output in cell.outputs], cell.outputs
    for source in SOURCES:
        assert source in shown(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [(cell.outputs, cell.execution_count) for cell in code_cells(notebook)] == [([], None)] * len(code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_explains_each_of_its_cells(path: Path) -> None:
    kinds = [cell.cell_type for cell in read(path).cells]
    assert all(kinds[index - 1] == "markdown" for index, kind in enumerate(kinds) if kind == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_path_of_a_machine(path: Path) -> None:
    assert [match[0] for cell in read(path).cells for match in MACHINE_PATH.finditer(cell.source)] == []


@pytest.mark.parametrize(
    ("text", "names_one"),
    [
        ("open('/home/ada/lake')", True),
        ('"/Users/ada/lake"', True),
        ("/tmp/lake", True),
        ("~/lake", True),
        ("C:\\lake", True),
        ("/Volumes/main/shop", True),
        ("dbfs:/lake", True),
        ("abfss://x@y.z/lake", True),
        ("s3://bucket/lake", True),
        ("./demo-lake/lake", False),
        ("../demo-lake/lake", False),
        ("delta.`{lake}/{name}`", False),
        ("size(a) / 1000", False),
        ("https://example.org/tmp/x", False),
        ("`from_offset`/`until_offset`", False),
    ],
)
def test_a_path_of_a_machine_is_noticed(text: str, names_one: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) == names_one


class Widgets:
    """What a notebook asks of Databricks."""

    def __init__(self, lake: str) -> None:
        self.widgets, self.value, self.names = self, lake, set[str]()

    def text(self, name: str, _default: str, _label: str) -> None:
        self.names.add(name)

    def get(self, name: str) -> str:
        assert name in self.names
        return self.value


@pytest.mark.parametrize(
    ("widget", "environment", "expected"),
    [
        ("main.shop", "from-environment", "main.shop"),
        ("", "from-environment", "from-environment"),
        ("", None, "./demo-lake/lake"),
        (None, "from-environment", "from-environment"),
        (None, None, "./demo-lake/lake"),
    ],
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_lake_is_the_widgets_else_the_environments_else_the_demos(
    path: Path,
    widget: str | None,
    environment: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WATERSMEET_LAKE", raising=False)
    if environment is not None:
        monkeypatch.setenv("WATERSMEET_LAKE", environment)
    names: dict[str, Any] = {} if widget is None else {"dbutils": Widgets(widget)}
    exec(code_cells(read(path))[0].source, names)
    assert names["lake"] == expected
