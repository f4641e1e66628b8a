"""What commands write, where nobody sits at a terminal: plain lines, each as long as it is, in any
encoding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tests.support.commands import in_process
from tests.unit.test_cli import config
from watersmeet.audit import show
from watersmeet.dev.init import write_example
from watersmeet.output import answer, print_json

LONG = "a word and " * 300 + "the end"
PROBLEM = {"what": LONG, "where": "watersmeet.yml, merge.timeout", "fix": "write it so"}
FINDINGS: dict[str, Any] = {"partitions": [], "quality": [], "warnings": [PROBLEM]}


def table(cell: str) -> Table:
    made = Table("name", "value", box=None)
    made.add_row("one", cell)
    return made


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        (Text(LONG), [LONG]),
        (Group(LONG, "second"), [LONG, "second"]),
        (table(LONG), [" name  value", f" one   {LONG}"]),
        (
            show.problems_view({"problems": [PROBLEM] * 2}),
            [f"problem watersmeet.yml, merge.timeout: {LONG}; write it so"] * 2,
        ),
        (
            show.status_view(FINDINGS),
            [
                "The lake has no record yet, and only Kafka knows its partitions.",
                f"warning watersmeet.yml, merge.timeout: {LONG}; write it so",
            ],
        ),
        (
            show.maintain_view({"tables": [{"table": "late", "before": 1, "now": 2, "gone": 3}]}),
            [
                "table  files before  files now  old files removed",
                "late   1             2          3",
            ],
        ),
        (Text("a smile is :smile:"), ["a smile is :smile:"]),
        (Group("a smile is :smile:"), ["a smile is :smile:"]),
    ],
)
@pytest.mark.parametrize("colours", ["", "FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"])
def test_without_a_terminal_an_item_is_one_plain_line_however_long(
    shown: RenderableType,
    lines: list[str],
    colours: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    if colours:
        monkeypatch.setenv(colours, "1")
    answer({}, False, lambda _: shown)
    assert capsys.readouterr().out.splitlines() == lines


def test_a_record_is_one_line_whatever_its_key_is(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({"source": "orders", "value": {"ts": 5}, "key": "x\ny\tz\u2028ä"}))
    done = in_process("try", file, "--no-close", "-c", config(tmp_path), cwd=tmp_path)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("orders[0]@0")]
    assert line.split()[:3] == ["orders[0]@0", "1", "x\\ny\\tz\\u2028ä"]


def test_json_is_ascii_and_loses_no_character(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"key": "".join(map(chr, range(0x400))) + "\ud800\u202e😀"}
    print_json(document)
    [line] = capsys.readouterr().out.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line) == document


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["broker", "--help"], []])
def test_without_a_terminal_help_has_no_boxes_and_breaks_no_line(
    arguments: list[str], tmp_path: Path
) -> None:
    lines = in_process(*arguments, cwd=tmp_path).stdout.splitlines()
    assert lines[0].startswith("Usage: ")
    assert [line for line in lines if {*line} & {*"│─╭╰…"}] == []
    indents = {len(line) - len(line.lstrip()) for line in lines}
    assert indents == {0, 2}, "a line that goes on would be further in"


COMMANDS = {
    "--help": 0,
    "try exämples.jsonl": 0,
    "try exämples.jsonl --json": 0,
    "try missing-ä-☃.jsonl": 2,
    "explain ☃": 0,
    "run ☃": 2,
}
"""Commands in an example's folder, each with its exit status."""

PROGRAM = """
import sys
from watersmeet.cli import main
statuses = []
for command in sys.argv[1:]:
    sys.argv[1:] = command.split()
    try:
        main()
        statuses.append(0)
    except SystemExit as ended:
        statuses.append(ended.code)
assert statuses == {statuses}, statuses
"""


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin-1"])
def test_no_command_fails_for_an_encoding(tmp_path: Path, encoding: str) -> None:
    write_example(tmp_path)
    record = {"source": "tracking", "value": {"type": "click", "ssid": 1, "aid": 2, "ts": 3}}
    records = [record, record | {"value": "☃ · ä"}]
    (tmp_path / "exämples.jsonl").write_text("\n".join(map(json.dumps, records)))
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    program = PROGRAM.format(statuses=[*COMMANDS.values()])
    done = subprocess.run(
        [sys.executable, "-c", program, *COMMANDS],
        cwd=tmp_path,
        env={**os.environ, **locale, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Error" not in done.stdout + done.stderr
    if encoding != "latin-1":
        assert b"'1' - partition 0 - 1970-01-01 " in done.stdout
