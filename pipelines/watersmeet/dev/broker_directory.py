"""The directory of an embedded broker: its record `broker.json`, its lock and its cluster's id."""

from __future__ import annotations

import contextlib
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from watersmeet.dev.processes import alive, until
from watersmeet.errors import BrokerError

# A process's start time is derived from the time of boot, which the system states in whole seconds.
_SAME_START_S = 2.0


class BrokerRecord(BaseModel):
    """The content of `broker.json`: the ports stay when the broker stops, the process goes."""

    model_config = ConfigDict(frozen=True)

    port: int
    controller_port: int
    admin_port: int | None = None
    pid: int | None = None
    create_time: float | None = None

    def stopped(self) -> BrokerRecord:
        """Return these ports, without a process."""
        return self.model_copy(update={"pid": None, "create_time": None})


def find_process(record: BrokerRecord | None) -> psutil.Process | None:
    """Return the live process of the record, never another one that has its id now."""
    if record is None or record.pid is None or record.create_time is None:
        return None
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.create_time) < _SAME_START_S
    except psutil.Error:
        return None
    return process if same and alive(process) else None


def read_cluster_id(directory: Path) -> str | None:
    """Return the id that Kafka writes when it has formatted the storage; None until then."""
    try:
        text = (directory / "data" / "meta.properties").read_text(encoding="latin-1")
    except FileNotFoundError:
        return None
    match = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return match[1] if match else None


def read_record(directory: Path) -> BrokerRecord | None:
    """Return what `broker.json` says; None where the file is missing or was tampered with."""
    try:
        return BrokerRecord.model_validate_json((directory / "broker.json").read_bytes())
    except (OSError, ValueError):
        return None


def write_record(directory: Path, record: BrokerRecord) -> None:
    """Replace `broker.json` as a whole: no reader sees half of it."""
    draft = directory / "broker.json.new"
    draft.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draft.replace(directory / "broker.json")


@contextlib.contextmanager
def locked(directory: Path, deadline: float) -> Iterator[None]:
    """Allow one start or stop at a time, or raise BrokerError; one that dies frees the lock."""

    def taken() -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("ab") as file:
            if not until(taken, deadline):
                raise BrokerError(
                    f"another start or stop of the broker in {directory} is still under way",
                    fix="try again later",
                )
            yield
    except OSError as error:
        raise BrokerError(
            f"the broker cannot use its directory {directory} ({error.strerror or error})",
            fix="name one that can be written",
        ) from error
