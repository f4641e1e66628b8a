"""Lakes as releases have left them, one for each layout, with the broker that they read from.

`tests/golden/lakes/LAYOUT.tar.xz` holds a lake's tables, its configuration, the data of its
embedded broker, and the records that were sent (`cases.json`): the input of the merge model. Kafka
has records that the lake has not read yet. Both engines have written to it.

    python -m tests.support.kept

makes the archive of the present layout: before its first release, never after it.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

import tests.conftest  # noqa: F401  # quick starts
from tests.support.cases import Case
from tests.support.rivers import EMBEDDED, ENGINES, FOLDER, River
from watersmeet.dev import broker
from watersmeet.lake.tables import LAYOUT_VERSION

FOLDER_OF_ARCHIVES = Path(__file__).parents[1] / "golden" / "lakes"
_PARTITIONS = 2
_LEFT_OUT = ("_checkpoints", "run.log", "broker.json", "broker.log", "server.properties", ".lock")
"""Where processes were, and what they said."""


@contextmanager
def kept_river(layout: int, folder: Path, lake: str) -> Iterator[River]:
    """A release's lake and its broker, which runs until the end of the block, as it was left; to be
    continued by an engine (`EMBEDDED` or `FOLDER`).
    """
    with tarfile.open(FOLDER_OF_ARCHIVES / f"{layout}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    kafka = broker.start(folder / "broker").bootstrap_servers
    try:
        config = yaml.safe_load((folder / "watersmeet.yml").read_text())
        cases = json.loads((folder / "cases.json").read_text())
        yield _continued(str(kafka), folder, config, cases, lake)
    finally:
        broker.stop(folder / "broker")


def _continued(
    kafka: str, folder: Path, config: dict[str, Any], kept: dict[str, Any], lake: str
) -> River:
    cases = {int(p): _as_case(case) for p, case in kept["cases"].items()}
    config |= {"kafka": {"bootstrap_servers": kafka}, "engine": ENGINES[lake]}
    river = River(kafka, folder, _PARTITIONS, 1, config, cases, kept["chunks"])
    river.write()
    return river


def make(folder: Path) -> None:
    """Writes the archive of the present layout."""
    kafka = broker.start(folder / "broker").bootstrap_servers
    try:
        river = River.make(str(kafka), folder, "kept", partitions=_PARTITIONS)
        for lake in (EMBEDDED, FOLDER, EMBEDDED, FOLDER):
            river.config["engine"] = ENGINES[lake]
            river.write()
            river.flow()
            river.finish()
        river.flow()
    finally:
        broker.stop(folder / "broker")
    cases = {p: _as_json(case) for p, case in river.cases.items()}
    (folder / "cases.json").write_text(json.dumps({"chunks": river.chunks, "cases": cases}))
    FOLDER_OF_ARCHIVES.mkdir(exist_ok=True)
    with tarfile.open(FOLDER_OF_ARCHIVES / f"{LAYOUT_VERSION}.tar.xz", "w:xz") as archive:
        for name in ("watersmeet.yml", "cases.json", "lake", "broker"):
            archive.add(folder / name, name, filter=_anonymous)


def _as_json(case: Case) -> dict[str, Any]:
    """The bytes of values as Latin-1 text."""
    values = {
        name: [None if v is None else v.decode("latin-1") for v in found]
        for name, found in case.values.items()
    }
    return asdict(case) | {"values": values}


def _as_case(kept: dict[str, Any]) -> Case:
    values = {
        name: [None if v is None else v.encode("latin-1") for v in found]
        for name, found in kept["values"].items()
    }
    return Case(**kept | {"values": values})


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in _LEFT_OUT:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        make(Path(made))
