"""Problems that `verify` and `validate` report, each with its place and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from watersmeet.errors import ConfigurationError, Problem, WatersmeetError

SHOWN = 10
"""Maximum number of problems of a check that are shown: enough to see what they have in common."""

REBUILD = "derive silver again from bronze: `watersmeet rebuild --into DIR`"


def as_problem(error: WatersmeetError, where: str) -> Problem:
    """Return what an error says; `where`: the place to blame where the error names none."""
    problem = error.problem
    return problem if problem.where else problem._replace(where=where)


def as_problems(error: WatersmeetError, where: str) -> list[Problem]:
    """Return all that an error says; `where` as for `as_problem`."""
    more = error.more if isinstance(error, ConfigurationError) else ()
    return [as_problem(each, where) for each in (error, *more)]


class Findings:
    """The first problems of a check, and how many more there are."""

    def __init__(self, check: str) -> None:
        self.check = check
        self.more = 0
        self.problems: list[Problem] = []

    def add(self, what: str, where: str, fix: str = REBUILD) -> None:
        """Keep the first `SHOWN` problems, and count the others."""
        if len(self.problems) < SHOWN:
            self.problems.append(Problem(what, where, fix))
        else:
            self.more += 1

    def of(self, what: str) -> Findings:
        """Return the same findings, with the name of what they are about."""
        labelled = Findings(f"{what}, {self.check}")
        labelled.more = self.more
        for problem in self.problems:
            labelled.problems.append(problem._replace(where=f"{what}, {problem.where}"))
        return labelled

    def described(self) -> Iterator[Problem]:
        """Yield the problems, and one that counts those that are not shown."""
        yield from self.problems
        if self.more:
            yield Problem(
                f"{self.more:,} more problems like these",
                self.check,
                "fix those first, then verify again",
            )


class Report(dict[str, Findings]):
    """What was found, by the name of the check."""

    def __missing__(self, check: str) -> Findings:
        self[check] = Findings(check)
        return self[check]


def answer(findings: Iterable[Findings], notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return the answer of `verify --json`: `ok`, `problems`, and `notes` if something could not be
    checked.
    """
    problems = [problem._asdict() for check in findings for problem in check.described()]
    sentences = list(notes)
    return {"ok": not problems, "problems": problems, **({"notes": sentences} if sentences else {})}
