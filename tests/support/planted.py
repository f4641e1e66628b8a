"""Faults that are planted in each layer, one at a time, with the test of `make test` that must
catch it.

A fault is a change of one text in one file of `pipelines/`. docs/testing.md lists them; `make
planted` plants each one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Planted(NamedTuple):
    """A fault: in `file`, `right` becomes `wrong`; `caught_by` is the test that fails of it."""

    fault: str
    file: str
    right: str
    wrong: str
    caught_by: str


PLANTED = [
    Planted(
        "a range of Kafka ends one record early",
        "pipelines/watersmeet/kafka/reading.py",
        "                yield messages, sizes[: len(messages)]\n",
        "                is_done = position >= offset_range.until_offset\n"
        "                taken = messages[:-1] if is_done else messages\n"
        "                yield taken, sizes[: len(taken)]\n",
        "tests/kafka/test_reading.py::test_a_range_holds_its_offsets_and_no_others",
    ),
    Planted(
        "an event time far in the future is let in",
        "pipelines/watersmeet/core/reading.py",
        "if kafka_time >= max(0, event_time - rules.max_future_ms):",
        "if kafka_time >= max(0, event_time - 2 * rules.max_future_ms):",
        "tests/core/test_reading.py::test_an_event_time_may_lie_just_so_far_after_kafkas",
    ),
    Planted(
        "a commit is not waited for until it is on the disk",
        "pipelines/watersmeet/lake/durable.py",
        "            finally:\n                log.sync()\n",
        "            finally:\n                pass\n",
        "tests/lake/test_durable.py::"
        "test_every_file_of_a_commit_and_every_folder_that_names_one_is_synced_when_the_call_returns",
    ),
    Planted(
        "a damaged file is read",
        "pipelines/watersmeet/lake/by_delta_rs.py",
        "        for name in {*may_meet(files, where)",
        "        for name in set() and {*may_meet(files, where)",
        "tests/lake/test_flipped.py::"
        "test_a_value_that_has_become_another_one_is_refused_and_no_other_file_is_missed",
    ),
    Planted(
        "a clock goes back at the end of a batch",
        "pipelines/watersmeet/core/plan.py",
        "return running if cursor.position is None else np.maximum(running, cursor.position)",
        "return running",
        "tests/property/test_plan.py::test_positions_and_heads_are_those_of_the_definition",
    ),
    Planted(
        "a late record is merged",
        "pipelines/watersmeet/core/merge.py",
        "(~is_late & ~is_passed, is_late, is_passed)",
        "(~is_passed, is_late, is_passed)",
        "tests/core/test_merge.py::test_merge_is_what_the_model_makes_of_the_same_records",
    ),
    Planted(
        "messages of one time are in the wrong order",
        "pipelines/watersmeet/core/sequence.py",
        'pc.sort_indices(rows, [(name, "ascending") for name in self.order])',
        'pc.sort_indices(rows, [(name, "descending") for name in self.order])',
        "tests/laws/test_gold.py::test_what_is_out_is_what_the_merge_model_says_byte_for_byte",
    ),
    Planted(
        "a message is sent again after a crash",
        "pipelines/watersmeet/gold.py",
        "            tails[p] = tail\n        self._note(",
        "            tails.setdefault(p, tail)\n        self._note(",
        "tests/laws/test_gold.py::test_what_is_out_but_not_noted_is_noted_by_the_next_start_and_not_sent_again",
    ),
    Planted(
        "a publisher goes on with its producer after a commit whose answer was lost",
        "pipelines/watersmeet/kafka/publisher.py",
        "        if trouble := producer.trouble or slow:\n",
        "        if trouble := slow:\n",
        "tests/kafka/test_wire.py::"
        "test_a_late_copy_of_a_commit_never_commits_a_part_of_the_next_transaction",
    ),
    Planted(
        "a start merges again what the last batch has merged",
        "pipelines/watersmeet/core/state.py",
        "        cursors = {**self.cursors, **plan.cursors()}\n        oldest",
        "        cursors = self.cursors\n        oldest",
        "tests/laws/test_restarts.py::"
        "test_a_batch_that_is_cut_off_is_there_as_a_whole_or_not_and_a_fenced_owner_changes_nothing",
    ),
    Planted(
        "a commit without its fence",
        "pipelines/watersmeet/running/owner.py",
        "        facts = {}\n        if application not in UNREAD:\n",
        "        return\n        if application not in UNREAD:\n",
        "tests/lake/test_commits.py::test_an_earlier_owner_writes_nothing_once_it_is_fenced",
    ),
    Planted(
        "delta-rs makes a commit twice",
        "pipelines/watersmeet/engine/embedded.py",
        "        if seen is not None and seen >= commit.transaction_version:\n            return\n",
        "",
        "tests/laws/test_engine.py::test_a_commit_is_appended_once_whoever_repeats_it",
    ),
    Planted(
        "Spark makes a commit twice",
        "pipelines/watersmeet/engine/spark_writer.py",
        "session_with(self.spark, {**settings, **more})",
        "session_with(self.spark, more)",
        "tests/laws/test_engine.py::test_a_merge_replaces_the_open_row_of_its_key_and_time_once_and_leaves_no_setting_behind",
    ),
    Planted(
        "a living owner is replaced at once",
        "pipelines/watersmeet/lake/lease.py",
        "            if now not in (seen, None):\n",
        "            if False:\n",
        "tests/lake/test_lease.py::test_a_layer_has_one_owner_and_other_layers_have_others",
    ),
    Planted(
        "verify keeps what it has found to itself",
        "pipelines/watersmeet/audit/problems.py",
        "        yield from self.problems\n",
        "        yield from ()\n",
        "tests/audit/test_verify.py::test_every_promise_that_is_broken_in_the_lake_is_found",
    ),
]


def caught(planted: Planted, folder: Path) -> bool:
    """Plant a fault in a copy of the package in an empty folder, and return whether its test fails
    there as it should.

    Before the fault is there, the test must pass.
    """
    shutil.copytree(
        ROOT / "pipelines" / "watersmeet",
        folder / "pipelines" / "watersmeet",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in (
        "tests",
        "docs",
        "schemas",
        "examples",
        "notebooks",
        "resources",
        "pyproject.toml",
        "README.md",
    ):
        (folder / name).symlink_to(ROOT / name)
    file = folder / planted.file
    text = file.read_text(encoding="utf-8")
    assert text.count(planted.right) == 1, (
        f"{planted.file} has no place any more for: {planted.fault}"
    )
    assert _exit_status(planted.caught_by, folder) == 0, (
        f"fails without a fault: {planted.caught_by}"
    )
    file.write_text(text.replace(planted.right, planted.wrong), encoding="utf-8")
    return _exit_status(planted.caught_by, folder) == 1


def _exit_status(test: str, folder: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long and not nightly",
        test,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'pipelines'}:{folder}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, timeout=600, check=False
    ).returncode


def main(folder: Path) -> int:
    """Plant every fault, say which test has caught it, and return how many were not caught."""
    missed = 0
    for number, planted in enumerate(PLANTED):
        is_caught = caught(planted, folder / str(number))
        missed += not is_caught
        sys.stdout.write(
            f"{'caught' if is_caught else 'MISSED'}: {planted.fault} ({planted.caught_by})\n"
        )
        sys.stdout.flush()
    return missed


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(temporary)))
