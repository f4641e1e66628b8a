"""Through Spark Connect: the layers, and what is asked of a lake that only Spark can open."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.configurations import SMALLEST
from tests.support.connect import DELTA, connect_server, without_spark
from tests.support.rivers import CATALOG, FOLDER, SCHEMA, Losses, River, catalog_lake

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server's catalog is."""
    return tmp_path_factory.mktemp("connect")


@pytest.fixture(scope="module")
def remote(place: Path) -> Iterator[str]:
    """A server with a catalog whose tables have their files in `place`."""
    with connect_server(place, {**catalog_lake(place)["spark"], **DELTA}) as found:
        yield found


@pytest.mark.promise("A14")
@pytest.mark.timeout(900)
def test_a_lake_is_filled_published_and_verified_through_spark_connect(
    kafka: str, tmp_path: Path, remote: str
) -> None:
    river = River.make(kafka, tmp_path, "connect", lake=FOLDER)
    river.flow()
    river.environment = without_spark() | {"SPARK_REMOTE": remote}
    river.finish()
    command = [sys.executable, "-m", "watersmeet", "verify", "--json", "-c", str(river.file)]
    done = subprocess.run(
        command, env=river.environment, capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout)["ok"]
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_lake_in_a_catalog_is_filled_and_published_through_spark_connect(
    kafka: str, place: Path, remote: str
) -> None:
    river = River.make(kafka, place, "connect-catalog", lake=CATALOG)
    river.flow()
    river.flow()
    river.environment = without_spark() | {"SPARK_REMOTE": remote}
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("grpc", "the client of Spark Connect lacks a package"),
        ("", "no server of Spark Connect answers at 127.0.0.1:"),
    ],
)
def test_spark_connect_that_cannot_work_is_refused_in_one_sentence(
    missing: str, said: str, tmp_path: Path
) -> None:
    values = SMALLEST | {
        "lake": {"catalog": "main", "schema": SCHEMA},
        "checkpoints": str(tmp_path),
    }
    (tmp_path / "watersmeet.yml").write_text(yaml.safe_dump(values))
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom watersmeet.cli import "
        f"main\n{f'sys.modules[{missing!r}] = None' * bool(missing)}\nmain()\n"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if missing:
            silent.listen()
        environment = without_spark() | {
            "SPARK_REMOTE": f"sc://127.0.0.1:{silent.getsockname()[1]}/;token=secret"
        }
        environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "pipelines")
        command = [sys.executable, str(program), "status"]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"watersmeet: {said}")
    assert "secret" not in done.stderr
    assert done.stderr.count("\n") == 1
