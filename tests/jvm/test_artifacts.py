from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest

from tests.support.commands import in_process
from watersmeet.errors import ArtifactsError
from watersmeet.jvm import artifacts
from watersmeet.jvm.artifacts import BROKER, LOCK, SPARK, cache_folder, fetch, jars, pinned

pytestmark = pytest.mark.promise("A19")

INSTALLED = Path(sys.prefix, "jars")
GROUP = "small"
NAMES = ["one-1.0.jar", "two-2.0-all.tar.gz", "three-3.0.jar"]
PLACES = ["org/example/one/1.0", "org/example/deep/two/2.0", "org/example/three/3.0"]
COORDINATES = [
    "org.example:one:1.0",
    "org.example.deep:two:2.0:tar.gz:all",
    "org.example:three:3.0",
]
SETTINGS = """\
<settings xmlns="http://maven.apache.org/SETTINGS/1.0.0"><mirrors>
  <mirror><id>other</id><mirrorOf>other</mirrorOf><url>http://127.0.0.1:1</url></mirror>
  <mirror><id>ours</id><mirrorOf>{of}</mirrorOf><url>{url}</url></mirror>
</mirrors></settings>
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for all artifacts, where the environment has none, as one has that pip has
    made."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


class Handler(SimpleHTTPRequestHandler):
    """Cuts off its first answer for a file whose name is in `torn`."""

    torn: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name in self.torn:
            self.torn.remove(name)
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
        else:
            super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


class Repository:
    """A Maven repository on this machine, in `folder`, with a lock of what it should have."""

    def __init__(self, tmp_path: Path, url: str) -> None:
        self.folder, self.url, self.lock = tmp_path / "repository", url, tmp_path / "jars.lock"
        lines = []
        for name, place, coordinates in zip(NAMES, PLACES, COORDINATES, strict=True):
            file = self.file(name, place)
            file.parent.mkdir(parents=True)
            file.write_text(f"the content of {name}")
            lines.append(f"{artifacts.hash_of(file)}  {GROUP}/{coordinates}\n")
        self.lock.write_text("".join(lines))

    def file(self, name: str, place: str) -> Path:
        return self.folder / place / name


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """The repository that the environment names, with a password in its URL; there is no Spark."""
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    handler = partial(Handler, directory=str(tmp_path / "repository"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        url = f"http://user:secret@127.0.0.1:{server.server_port}/"
        monkeypatch.setenv(artifacts.REPOSITORY, url)
        yield Repository(tmp_path, url)
        server.shutdown()
        thread.join()


def sentence(error: pytest.ExceptionInfo[ArtifactsError]) -> str:
    [line] = str(error.value).splitlines()
    return line


def named(said: str) -> list[Path]:
    """The files that are named as missing."""
    return [
        Path(line.partition("missing: ")[2]) for line in said.splitlines() if "missing: " in line
    ]


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_what_make_install_has_fetched_is_used_and_is_what_is_recorded(group: str) -> None:
    assert jars(group) == [INSTALLED / group / name for name in pinned(group)]


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_what_somebody_has_put_into_the_cache_is_used_without_a_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    shutil.copytree(INSTALLED / group, cache / group)
    (cache / group / "other-1.0.jar").write_bytes(b"of another version")
    assert jars(group) == [cache / group / name for name in pinned(group)]


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_without_the_package_that_fetches_its_extra_is_named_with_each_file_and_its_place(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, group: str
) -> None:
    shutil.copytree(INSTALLED / group, cache / group)
    first, second, *_ = pinned(group)
    for name in (first, second):
        (cache / group / name).unlink()
    monkeypatch.setitem(sys.modules, "jgo.maven", None)
    with pytest.raises(ArtifactsError, match=r'`pip install "watersmeet\[broker\]"`') as raised:
        jars(group)
    assert named("\n".join(caplog.messages)) == [cache / group / first, cache / group / second]
    assert sentence(raised).endswith(f"put the files named above into {cache / group}")


def test_a_file_that_is_not_the_recorded_one_is_never_used(cache: Path) -> None:
    shutil.copytree(INSTALLED / SPARK, cache / SPARK)
    torn = cache / SPARK / next(iter(pinned(SPARK)))
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(ArtifactsError, match="is not the file that is recorded") as raised:
        jars(SPARK)
    assert str(torn) in sentence(raised)


def test_a_folder_that_cannot_be_written_to_is_said(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    with pytest.raises(ArtifactsError, match=r"cannot be written to .*XDG_CACHE_HOME") as raised:
        jars(SPARK)
    assert str(cache) in sentence(raised)


def test_the_recorded_files_are_those_of_the_ivy_file() -> None:
    text = LOCK.with_name("ivy.xml").read_text(encoding="utf-8")
    for group, module in (
        (SPARK, "delta-spark_4.2_2.13"),
        (BROKER, "kafka_2.13"),
        (BROKER, "slf4j-simple"),
    ):
        revision = text.partition(f'name="{module}" rev="')[2].partition('"')[0]
        assert f"{module}-{revision}.jar" in pinned(group)


# -- fetching


def test_what_is_missing_is_fetched_from_the_repository_that_is_named_without_spark(
    repository: Repository, tmp_path: Path
) -> None:
    folder = tmp_path / "jars" / GROUP
    assert fetch(GROUP, folder.parent, repository.lock) == [folder / name for name in NAMES]
    assert names_in(folder) == sorted(NAMES)
    shutil.rmtree(repository.folder)
    (tmp_path / "again" / GROUP).mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "again" / GROUP, dirs_exist_ok=True)
    assert len(fetch(GROUP, tmp_path / "again", repository.lock)) == len(NAMES)


@pytest.mark.parametrize("of", ["*", "central", "other, central", "external:*,!other"])
def test_maven_s_mirror_is_where_they_are_fetched_from_if_no_other_place_is_named(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.delenv(artifacts.REPOSITORY)
    settings = tmp_path / "home" / ".m2" / "settings.xml"
    settings.parent.mkdir(parents=True)
    settings.write_text(SETTINGS.format(of=of, url=repository.url))
    assert len(fetch(GROUP, tmp_path / "jars", repository.lock)) == len(NAMES)


def test_a_file_that_is_not_the_recorded_one_is_not_taken_and_the_others_are(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository.file(NAMES[1], PLACES[1]).write_text("something else")
    with pytest.raises(
        ArtifactsError, match=rf"127\.0\.0\.1 gives another {NAMES[1]} than"
    ) as raised:
        fetch(GROUP, tmp_path / "jars", repository.lock)
    assert "secret" not in sentence(raised) + "\n".join(caplog.messages)
    assert names_in(tmp_path / "jars" / GROUP) == sorted([NAMES[0], NAMES[2]])
    assert named("\n".join(caplog.messages)) == [tmp_path / "jars" / GROUP / NAMES[1]]


def test_what_a_repository_does_not_have_is_said_and_named(
    repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository.file(NAMES[0], PLACES[0]).unlink()
    with pytest.raises(ArtifactsError, match=rf"127\.0\.0\.1 does not have {NAMES[0]}"):
        fetch(GROUP, tmp_path / "jars", repository.lock)
    assert named("\n".join(caplog.messages)) == [tmp_path / "jars" / GROUP / NAMES[0]]


def test_an_answer_that_is_cut_off_is_asked_for_again(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "torn", {NAMES[2]})
    assert len(fetch(GROUP, tmp_path / "jars", repository.lock)) == len(NAMES)
    assert Handler.torn == set()


def test_without_a_network_it_is_said_why_and_which_files_belong_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv(artifacts.REPOSITORY, "http://127.0.0.1:1/")
    done = in_process("fetch", "--into", tmp_path / "elsewhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "127.0.0.1 does not answer: Connection refused" in done.stderr.splitlines()[-1]
    assert named("\n".join(caplog.messages)) == [
        tmp_path / "elsewhere" / SPARK / name for name in pinned(SPARK)
    ]
