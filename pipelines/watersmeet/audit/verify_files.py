"""Check of the bytes of a lake's files in a folder, by the checksums beside them."""

from __future__ import annotations

from watersmeet.audit.problems import Findings
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import LAST_VACUUM, LOG, damaged_file, is_intact
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


def damaged_files(reader: TableReader, settings: Settings) -> Findings:
    """Find data files of the tables as they are now, and files of their logs, that do not have the
    content that was written.
    """
    findings = Findings("files")
    lake = Lake(settings)
    if lake.folder is None:
        return findings
    for table in lake.layout:
        folder = lake.folder / table
        for checksum in sorted(folder.rglob(".*.crc")):
            file = checksum.with_name(checksum.name.removeprefix(".").removesuffix(".crc"))
            # Nothing relies on the note of a vacuum, so that a power cut may tear it.
            if file.name == LAST_VACUUM or not file.exists() or is_intact(file):
                continue
            is_of_log = file.suffix != ".parquet" or LOG in file.parts
            # Spark may be about to write what no commit names yet.
            if is_of_log or reader.has_data_file(table, file.name):
                problem = damaged_file(table, str(file.relative_to(folder))).problem
                findings.add(problem.what, table, problem.fix)
    return findings
