"""Whether the object store of a lake can be used, found out by using it. A folder needs no such look."""

from __future__ import annotations

import uuid

from pipelines.errors import ConfigurationError
from pipelines.lake.files import Files
from pipelines.lake.location import Lake, has_store


def stored(lake: Lake) -> list[str]:
    """Where a run writes that is in an object store: the lake, and its checkpoints with the renewals of leases."""
    places = [lake.settings.checkpoints] if lake.is_catalog else [lake.location, lake.settings.checkpoints]
    return [place for place in places if has_store(place)]


def check_readable(lake: Lake) -> None:
    """Raises WatersmeetError where the lake's objects cannot be listed: what only reads needs no more."""
    if not lake.is_catalog and has_store(lake.location):
        Files(lake.storage).check_readable(lake.location)


def check_writable(lake: Lake) -> None:
    """Raises WatersmeetError where the store of the lake or of its checkpoints is away, refuses, or lets two writers make a file.

    A file is made there, tried to be made again, and deleted. Only a store that refuses the second try keeps one commit from
    replacing another: that takes conditional puts (`If-None-Match`), which not every store that speaks S3 knows.
    """
    for place in stored(lake):
        files, probe = Files(lake.storage), f"{place}/_probe-{uuid.uuid4()}"
        first, second = files.create(probe), files.create(probe)
        files.read_text(probe)
        files.delete(probe)  # lists, too
        if not first or second:
            raise ConfigurationError(
                f"lake: the object store of {place} lets two writers make the same file, so that one commit could replace "
                "another; use one with conditional puts (If-None-Match), such as Amazon S3 itself"
            )
