from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import in_process
from watersmeet.errors import ArtifactsError
from watersmeet.jvm import artifacts
from watersmeet.jvm.artifacts import BROKER, IVY_FILE, SPARK, cache_folder, fetch, jars, pinned

pytestmark = pytest.mark.promise("A19")

INSTALLED = Path(sys.prefix, "jars")
IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="folder"/>
  <resolvers>
    <filesystem name="folder">
      <artifact pattern="{folder}/[artifact]-[revision].[ext]"/>
    </filesystem>
  </resolvers>
</ivysettings>
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for all artifacts, where the environment has none, as one has that pip has
    made."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def sentence(error: pytest.ExceptionInfo[ArtifactsError]) -> str:
    [line] = str(error.value).splitlines()
    return line


def named(said: str) -> list[Path]:
    """The files that are named as missing."""
    return [
        Path(line.partition("missing: ")[2]) for line in said.splitlines() if "missing: " in line
    ]


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_what_make_install_has_fetched_is_used_and_is_what_is_recorded(group: str) -> None:
    assert jars(group) == [INSTALLED / group / name for name in pinned(group)]


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_what_somebody_has_put_into_the_cache_is_used_without_java(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    shutil.copytree(INSTALLED / group, cache / group)
    (cache / group / "other-1.0.jar").write_bytes(b"of another version")
    assert jars(group) == [cache / group / name for name in pinned(group)]


@pytest.mark.parametrize("group", [SPARK, BROKER])
def test_what_cannot_be_fetched_is_named_with_its_place(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    group: str,
) -> None:
    shutil.copytree(INSTALLED / group, cache / group)
    first, second, *_ = pinned(group)
    for name in (first, second):
        (cache / group / name).unlink()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ArtifactsError) as raised:
        jars(group)
    assert named("\n".join(caplog.messages)) == [cache / group / first, cache / group / second]
    assert "Java 17 or 21" in sentence(raised)
    assert sentence(raised).endswith(f"put the files named above into {cache / group}")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ArtifactsError, match=r'`pip install "watersmeet\[broker\]"`'):
        jars(group)


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
    text = IVY_FILE.read_text(encoding="utf-8")
    for group, module in (
        (SPARK, "delta-spark_4.2_2.13"),
        (BROKER, "kafka_2.13"),
        (BROKER, "slf4j-simple"),
    ):
        revision = text.partition(f'name="{module}" rev="')[2].partition('"')[0]
        assert f"{module}-{revision}.jar" in pinned(group)


# -- with Ivy itself


@pytest.mark.long
def test_without_a_network_it_is_said_why_and_which_files_belong_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    nowhere = [
        f"-D{scheme}.proxyHost=127.0.0.1 -D{scheme}.proxyPort=1" for scheme in ("http", "https")
    ]
    monkeypatch.setenv(
        "JAVA_TOOL_OPTIONS", " ".join([*nowhere, f"-Divy.default.ivy.user.dir={tmp_path / 'ivy'}"])
    )
    done = in_process("fetch", "--into", tmp_path / "elsewhere", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Connection refused" in done.stderr.splitlines()[-1]
    assert named("\n".join(caplog.messages)) == [
        tmp_path / "elsewhere" / SPARK / name for name in pinned(SPARK)
    ]


@pytest.mark.long
def test_what_a_repository_of_ones_own_has_is_fetched_and_the_rest_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Without descriptors Ivy knows of no dependencies, and finds what `ivy.xml` names itself."""
    repository, settings = tmp_path / "repository", tmp_path / "settings.xml"
    shutil.copytree(INSTALLED / SPARK, repository)
    settings.write_text(IVY_SETTINGS.format(folder=repository))
    monkeypatch.setenv(artifacts.SETTINGS, str(settings))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Divy.default.ivy.user.dir={tmp_path / 'ivy'}")
    delta, *others = sorted(pinned(SPARK), key=lambda name: not name.startswith("delta-spark"))
    with pytest.raises(ArtifactsError, match="could not be fetched"):
        fetch(SPARK, cache)
    assert named("\n".join(caplog.messages)) == [
        cache / SPARK / name for name in pinned(SPARK) if name in others
    ]
    assert [jar.name for jar in (cache / SPARK).iterdir()] == [delta], (
        "nothing but what is whole, and no temporary folder"
    )
    torn = repository / delta
    torn.write_bytes(torn.read_bytes()[:-1])
    shutil.rmtree(tmp_path / "ivy")
    with pytest.raises(
        ArtifactsError, match=r"is not the file that is recorded .* delete Ivy's own copy"
    ):
        fetch(SPARK, tmp_path / "again")
    assert list((tmp_path / "again" / SPARK).iterdir()) == []
