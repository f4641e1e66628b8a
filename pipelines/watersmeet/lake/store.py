"""A lake's location, an object store or a folder: its reader, and checks of it by using it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from watersmeet.errors import ConfigurationError
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.files import Files
from watersmeet.lake.location import OPENED_BY_DELTA_RS, Lake, has_store, local_path, scheme_of
from watersmeet.lake.table_reader import TableReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def stored(lake: Lake) -> list[str]:
    """Return the places in an object store that a run writes to.

    They are the lake, and its checkpoints with the renewals of leases.
    """
    places = (
        [lake.settings.checkpoints]
        if lake.is_catalog
        else [lake.location, lake.settings.checkpoints]
    )
    return [place for place in places if has_store(place)]


def check_readable(lake: Lake) -> None:
    """Raise WatersmeetError where the lake's objects cannot be listed.

    A command that only reads needs no more.
    """
    if not lake.is_catalog and has_store(lake.location):
        Files(lake.storage).check_readable(lake.location)


def check_openable(lake: Lake) -> None:
    """Raise ConfigurationError where the embedded engine is to open a lake that only Spark can."""
    if lake.settings.engine == "embedded" and lake.needs_spark:
        raise ConfigurationError(
            f"embedded cannot open {lake.location}",
            where="engine",
            fix=(
                "name an object-store URI (s3:, abfss:, gs:) or a folder (its path "
                f"{OPENED_BY_DELTA_RS}) as the lake, or engine: spark"
            ),
        )


def check_writable(lake: Lake) -> None:
    """Raise WatersmeetError where a run could not write to the lake.

    - The engine cannot open the lake.
    - Its folder takes no commits.
    - The store of the lake or of its checkpoints is away, refuses, or lets two writers make a file.

    In a store, a file is made, made a second time, and deleted. Only a store that refuses the
    second attempt keeps one commit from replacing another: that takes conditional puts
    (`If-None-Match`), which not every store that speaks S3 knows.
    """
    check_openable(lake)
    if not lake.is_catalog and scheme_of(lake.location) is None:
        _check_folder(Path(local_path(lake.location)))
    for place in stored(lake):
        files = Files(lake.storage)
        probe = f"{place}/_probe-{uuid.uuid4()}"
        files.create(probe)  # said to exist where the answer to a first try did not come
        is_made_again = files.create(probe)
        is_there = files.read_text(probe) is not None
        files.delete(probe)  # lists, too
        if is_made_again or not is_there:
            raise ConfigurationError(
                f"the object store of {place} lets two writers make the same file, so that "
                "one commit could replace another",
                where="lake",
                fix="use one with conditional puts (If-None-Match), such as Amazon S3 itself",
            )


def _check_folder(folder: Path) -> None:
    # The folder need not exist. delta-rs makes the file of a commit as a hard link, so that it
    # replaces no other. Folders mounted from a store often lack hard links.
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with TemporaryDirectory(prefix="watersmeet-", dir=existing) as name:
            probe = Path(name, "probe")
            probe.touch()
            os.link(probe, Path(name, "linked"))
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} takes no commits ({error.strerror})",
            where="lake",
            fix=(
                "make it writable, or name one on a file system with hard links, an object store "
                "by its URI, or a schema of a catalog"
            ),
        ) from None


def reader(lake: Lake, spark: Callable[[], SparkSession]) -> TableReader:
    """Return `TableReader` by delta-rs where it can open every table, else by Spark.

    Spark's session starts with the first query.
    """
    if lake.needs_spark:
        from watersmeet.lake.by_spark import SparkReader

        return SparkReader(lake, spark)
    return DeltaRsReader(lake)
