"""The laws of the notebooks: each runs from top to bottom on a lake of any sources, answers, only
reads, and is stored without outputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import psutil
import pytest
import yaml
from nbclient import NotebookClient
from pyspark.sql import SparkSession

from tests.support.cases import random_case
from tests.support.configurations import settings_for
from tests.support.inputs import input_of, tp_of
from tests.support.lakes import CaseLake, as_published, engine_for, write_configuration
from tests.support.tenants import tenant_cases
from watersmeet.core.idle import IdleDecision
from watersmeet.core.silver import in_silver
from watersmeet.lake import tables
from watersmeet.lake.progress import decision_rows
from watersmeet.running.owner import now_ms

pytestmark = [pytest.mark.long, pytest.mark.promise("A9")]

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))
SOURCES = ("clicks", "orders", "refunds")
SEEDS = (5370, 15, 4014)  # partition 1 has no clock; the others have records of every kind
WARNING = "records that are not in bronze yet are not counted"
"""What `status` says where Kafka does not answer."""

ANSWERS = {
    "01_explore_silver": ["all, and valid", "half_up_to"],
    "02_audit_a_decision": [
        "generation",
        "until_offset",
        "opened",
        "as of version",
        "first_seq",
    ],
    "03_late_and_quarantine": [
        "late_share",
        "nine_in_ten_up_to_s",
        "T = 200ms",
        "complete: with",
        "undecodable",
    ],
    "04_operate": [
        "waiting",
        "held",
        "waits_for",
        "lag of clicks",
        "latest_decided_at",
        "lead_of_clicks_s",
        "MiB",
    ],
}
"""Words that stand in what a notebook shows, and so in its answers."""

WITH_TENANTS = {
    "01_explore_silver": ["waiting", "y/1 %"],
    "02_audit_a_decision": ["the clock of tenant"],
    "03_late_and_quarantine": ["lag 300ms", "waiting for their tenant's clock"],
    "04_operate": ["slowest", "waiting"],
}
"""The same of a lake with tenants."""

MACHINE_PATH = re.compile(
    r"(?<![\w.:/-])(/(home|Users|root|tmp|work|var|mnt|opt|srv|data|dbfs|Volumes|Workspace)\b|~/|[A-Za-z]:\\)"
    r"|\b(dbfs|file|s3a?|gs|abfss?|wasbs?)://?\w"
)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def configuration(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a lake with three sources, which no notebook can have heard of: merged in several batches,
    with open, finished and published records, late and refused ones, a word of the idle policy, and
    a partition that has no clock.
    """
    folder: Path = tmp_path_factory.mktemp("notebooks")
    settings = settings_for(folder, sources=SOURCES, publish__valid="size(orders) > 0")
    file = write_configuration(settings, folder)
    cases = {partition: random_case(seed, sources=SOURCES) for partition, seed in enumerate(SEEDS)}
    lake = CaseLake(engine_for(lambda: root_session, settings), settings, cases)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge(lake.quick)
    noted = as_published(lake.reader, lake.engine.lake.layout, "merged (a.b)", now_ms())
    lake.owner().append(tables.PUBLISHED, noted)
    head = cases[0].merged(SOURCES).heads[input_of("orders")]
    last_offset = len(cases[0].values["orders"]) - 1
    # Which moves nothing.
    decided = [(tp_of("orders", 0), IdleDecision(last_offset, head))]
    decisions = decision_rows(decided, now_ms(), None, 0)
    schema = lake.engine.lake.schema(tables.SILVER)
    lake.owner().append(tables.SILVER, in_silver(decisions, "idle", schema), tables.BESIDE)
    silver = lake.silver()
    assert {row[2] for row in silver} == {"open", "timed_out"}
    assert any(all(row[5:]) for row in silver)
    assert any(case.merged(SOURCES).clock is None for case in cases.values())
    assert len(lake.plans) >= 2
    for table in (tables.LATE, tables.QUARANTINE, tables.PUBLISHED):
        assert lake.reader.select(table, ["partition"]).num_rows, table
    return file


@pytest.fixture(scope="module")
def with_tenants(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a lake with tenants, of which some are behind: merged in several batches, with records of
    every kind."""
    folder: Path = tmp_path_factory.mktemp("tenants")
    merge = {"timeout": "100ms", "tenant": "g", "tenant_max_lag": "300ms"}
    settings = settings_for(folder, merge=merge)
    file = write_configuration(settings_for(folder), folder)
    file.write_text(
        yaml.safe_dump(yaml.safe_load(file.read_text()) | {"merge": merge}, sort_keys=False)
    )
    lake = CaseLake(engine_for(lambda: root_session, settings), settings, tenant_cases(6))
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge(lake.quick)
    assert {row[2] for row in lake.silver()} == {"open", "timed_out", "waiting"}
    return file


class Executed(NamedTuple):
    """A notebook after its cells were run, which files of the lake it has changed, and what it has
    left behind."""

    notebook: Any
    changed: list[str]
    left: list[Path]


@pytest.fixture(scope="module")
def executed(configuration: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Executed]:
    return executed_on(configuration, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(scope="module")
def executed_with_tenants(
    with_tenants: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Path, Executed]:
    return executed_on(with_tenants, tmp_path_factory.mktemp("kernel"))


def executed_on(configuration: Path, folder: Path) -> dict[Path, Executed]:
    """All notebooks on a lake, one after the other in a kernel that forgets every name in between:
    they share its Spark, as on a cluster.
    """
    found = {}
    cells = nbformat.v4.new_notebook()  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as environment:
        # Where they do not pile up.
        for name in (
            "IPYTHONDIR",
            "JUPYTER_RUNTIME_DIR",
            "JUPYTER_CONFIG_DIR",
            "TMPDIR",
        ):
            (folder / name).mkdir()
            environment.setenv(name, str(folder / name))
        with kernel(cells, folder) as client:
            for path in NOTEBOOKS:
                lake = configuration.parent / "lake"
                notebook, before = read(path), contents(lake)
                names = {"WATERSMEET_LAKE": str(lake), "WATERSMEET_CONFIG": str(configuration)}
                begin = nbformat.v4.new_code_cell(
                    f"%reset -f\nimport os\nos.environ.update({names})"
                )  # type: ignore[no-untyped-call]
                for cell in [begin, *notebook.cells]:
                    cells.cells.append(cell)
                    client.execute_cell(cell, len(cells.cells) - 1)
                changed = sorted(name for name, _ in contents(lake).items() ^ before.items())
                found[path] = Executed(
                    notebook, changed, list((folder / "TMPDIR").glob("watersmeet-*"))
                )
    return found


@contextmanager
def kernel(notebook: Any, folder: Path) -> Iterator[NotebookClient]:
    """A kernel of this Python, with a Spark of its own; no process of it is left behind."""
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": str(folder)}}
    )
    before = set(psutil.Process().children(recursive=True))
    started: set[psutil.Process] = set()
    names: list[str] = []
    try:
        with client.setup_kernel():
            try:
                yield client
            finally:
                started = set(psutil.Process().children(recursive=True)) - before
                names = [process.name() for process in started]
    finally:
        _, alive = psutil.wait_procs(list(started), timeout=60)
        for process in alive:
            process.kill()
    assert any("java" in name for name in names), names
    assert alive == []


def shown(cell: Any) -> str:
    """All that a cell has shown, as plain text."""
    return "\n".join(
        output["data"]["text/plain"] if "data" in output else output.get("text", "")
        for output in cell.outputs
    )


def contents(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_notebook_is_tried() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(ANSWERS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_lake_of_any_sources_and_only_reads(
    path: Path, executed: dict[Path, Executed]
) -> None:
    notebook, changed, left = executed[path]
    assert changed == []
    assert left == [], "what it made for itself is gone"
    for cell in code_cells(notebook):
        assert cell.outputs, f"shows nothing: {cell.source}"
        said = [output.text for output in cell.outputs if output.output_type == "stream"]
        assert all(WARNING in text for text in said), said
        assert "Empty DataFrame" not in shown(cell), f"no answer: {cell.source}"
    for word in (*SOURCES, *ANSWERS[path.stem]):
        assert word in "\n".join(map(shown, code_cells(notebook))), word


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_lake_with_tenants_and_says_so(
    path: Path, executed_with_tenants: dict[Path, Executed]
) -> None:
    notebook, changed, left = executed_with_tenants[path]
    assert (changed, left) == ([], [])
    text = "\n".join(map(shown, code_cells(notebook)))
    for word in ("tenant", *WITH_TENANTS[path.stem]):
        assert word in text, word


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [(cell.outputs, cell.execution_count) for cell in code_cells(notebook)] == [
        ([], None)
    ] * len(code_cells(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_explains_each_of_its_cells(path: Path) -> None:
    kinds = [cell.cell_type for cell in read(path).cells]
    assert all(kinds[index - 1] == "markdown" for index, kind in enumerate(kinds) if kind == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_path_of_a_machine(path: Path) -> None:
    assert [
        match[0] for cell in read(path).cells for match in MACHINE_PATH.finditer(cell.source)
    ] == []


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


def test_a_notebook_that_takes_a_configuration_is_set_up_like_the_others() -> None:
    set_up = [[cell.source for cell in read(path).cells[1:5]] for path in NOTEBOOKS[1:]]
    assert all(cells == set_up[0] for cells in set_up)


class Widgets:
    """What a notebook asks of Databricks."""

    def __init__(self, value: str) -> None:
        self.widgets, self.value, self.names = self, value, set[str]()

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
        ("", None, None),
        (None, "from-environment", "from-environment"),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_reads_is_the_widgets_else_the_environments_else_the_demos(
    path: Path,
    widget: str | None,
    environment: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, demo = (
        ("lake", "./demo-lake/lake")
        if path == NOTEBOOKS[0]
        else ("config", "./demo-lake/watersmeet.yml")
    )
    variable = f"WATERSMEET_{name.upper()}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(variable, raising=False)
    if environment is not None:
        monkeypatch.setenv(variable, environment)
    names: dict[str, Any] = {} if widget is None else {"dbutils": Widgets(widget)}
    exec(code_cells(read(path))[0].source, names)
    assert names[name] == (expected or demo)
