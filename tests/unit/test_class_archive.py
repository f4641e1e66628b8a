"""The archive of classes by which Spark's JVM starts more quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from watersmeet.jvm import class_archive
from watersmeet.jvm.artifacts import java_command

START = """
import sys
from pathlib import Path
import psutil
from watersmeet.engine.session import spark_session
from watersmeet.jvm import class_archive
class_archive.folder = lambda: Path(sys.argv[1])
spark_session({})
[jvm] = [p for p in psutil.Process().children(recursive=True) if p.name() == "java"]
print(*{mapped.path for mapped in jvm.memory_maps()})
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(class_archive, "folder", lambda: tmp_path)
    return tmp_path


def test_an_archive_is_used_for_the_java_and_the_spark_that_it_was_made_for(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert class_archive.java_options() == []
    new, other = place / "new", place / "spark-of-another-java.5.jsa"
    new.write_bytes(b"classes")
    other.write_bytes(b"other")
    class_archive.keep(new)
    [file] = place.iterdir()
    assert class_archive.archive() == file
    assert class_archive.java_options()[0] == f"-XX:SharedArchiveFile={file}"
    home = tmp_path_factory.mktemp("spark")
    (home / "jars").mkdir()
    (home / "jars" / "spark-core.jar").write_bytes(b"")
    monkeypatch.setenv("SPARK_HOME", str(home))
    assert class_archive.java_options() == []


def test_an_archive_that_was_cut_off_is_not_used(place: Path) -> None:
    new = place / "new"
    new.write_bytes(b"classes")
    class_archive.keep(new)
    [file] = place.iterdir()
    os.truncate(file, 3)
    assert class_archive.java_options() == []


def test_java_starts_without_a_word_where_an_archive_does_not_fit(place: Path) -> None:
    new = place / "new"
    new.write_bytes(b"classes")
    class_archive.keep(new)
    command = [str(java_command()), *class_archive.java_options(), "-version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert "warning" not in done.stderr


@pytest.mark.long
def test_sparks_jvm_maps_the_archive_that_make_install_has_made(tmp_path: Path) -> None:
    archive = class_archive.archive()
    assert archive is not None
    folder = tmp_path / "any folder, größer"
    folder.mkdir()
    (folder / archive.name).symlink_to(archive)
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert str(archive.resolve()) in done.stdout
