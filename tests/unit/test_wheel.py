"""The wheel has what the docs name, for those without a clone."""

from __future__ import annotations

import re
import subprocess
import sys
from zipfile import ZipFile

import pytest

from tests.unit.test_docs import PAGES, ROOT, rows, text_of

INSTALL = ROOT / "docs" / "install.md"
LINK = re.compile(r"\]\((\.\./(?:examples|notebooks|resources)/[^)#\s]+)\)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in the wheel, as they lie in an environment."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [file] = folder.glob("*.whl")
    with ZipFile(file) as archive:
        return {re.sub(r"^watersmeet-[^/]+\.data/data/", "", name) for name in archive.namelist()}


def places() -> dict[str, str]:
    """By what the page calls its place in a clone, that in an environment."""
    table = text_of(INSTALL).partition("## Where everything is")[2]
    return {
        row[1].strip("`"): row[2].strip("`").removeprefix("/opt/watersmeet/") for row in rows(table)
    }


def test_each_file_that_a_page_links_to_is_where_the_page_about_installing_says(
    wheel: set[str],
) -> None:
    is_for_clones = re.compile("databricks|testing|walkthrough|performance")
    linked = {
        file.relative_to(ROOT).as_posix()
        for page in PAGES
        if not is_for_clones.search(page.name)
        for target in LINK.findall(text_of(page))
        if (file := (page.parent / target).resolve()).is_file()
    }
    assert len(linked) > 10
    for file in linked:
        [(here, there)] = [pair for pair in places().items() if file.startswith(pair[0])]
        assert there + file.removeprefix(here) in wheel


def test_every_place_that_the_page_names_is_there(wheel: set[str]) -> None:
    assert len(places()) >= 5
    for here, there in places().items():
        assert (ROOT / here).exists() or here.startswith(".venv/"), here
        if not there.startswith(("bin/", "~")):
            packaged = there.replace("the package `watersmeet", "watersmeet")
            assert any(name.startswith(packaged) for name in wheel), there
