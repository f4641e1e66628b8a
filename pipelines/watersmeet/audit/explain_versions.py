"""Facts about corrections for `explain`: the versions of a merge record, the records that late ones
have opened, and what has become of each late record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from watersmeet.audit.explain_sink import SentMessages
from watersmeet.audit.show import utc
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import CORRECTED, EXCESS, ID, TOO_MANY, VERSION, late_born_id
from watersmeet.lake.generations import Generations
from watersmeet.lake.progress import BatchVersions

JsonObject = dict[str, Any]

CORRECTION_COLUMNS: Final = (
    *("generation", "partition", "tenant", "event_time", "is_late_born", "version"),
    *("source", "topic", "offset", "position", "u", "settled_at", "valid", "invalid_reason"),
    *("batch", "last_event_time", "id", "has_message"),
)
"""The columns of `corrections` that the facts are made of, beside the parts."""

_Record = tuple[int, int, str, int, str]
"""Generation, partition, tenant and event time (ms) of a merge record, and the id of a late-born
one: several may have one event time where a lake was lost.
"""

_Late = tuple[int, int, InputId, int]
"""Generation, partition, input and offset of a late record."""

_DELETED: Final[JsonObject] = {"position": None, "batch": None}

_WHY_LATE_BORN: Final = "late-born: no merge record that had closed could hold it"


class CorrectionFacts:
    """The corrections of a key. Times are in ms.

    - `rows`: its rows of `corrections`, each with its parts as (input, offset, event time) under
      `parts`.
    - `repeated`: the late ones of its rows of `duplicates`.
    - `deleted_until`: by partition, the time before which `keep` has deleted rows of either table.
    """

    def __init__(
        self,
        rows: Iterable[JsonObject],
        repeated: Iterable[JsonObject],
        generations: Generations,
        sent: SentMessages,
        deleted_until: Mapping[int, int],
    ) -> None:
        self._generations = generations
        self._sent = sent
        self._deleted_until = deleted_until
        self._by_record = defaultdict[_Record, list[JsonObject]](list)
        self._by_late = dict[_Late, JsonObject]()
        for row in sorted(rows, key=lambda row: (row["partition"], CORRECTED.place(row))):
            if row["version"]:
                self._by_record[_record_of(row)].append(row)
            self._by_late[_late_of(row)] = row
        self._repeated: Set[_Late] = {_late_of(row) for row in repeated}

    def versions(self, generation: int, row: JsonObject) -> list[JsonObject]:
        """Return the versions of a merge record, a row of silver of that generation."""
        of_row = self._by_record.get(_record_of({**row, "generation": generation}), ())
        return [self._version(correction) for correction in of_row]

    def late_born(self, versions_of_silver: BatchVersions) -> list[JsonObject]:
        """Return the records that late ones have opened, each as its newest version has it.

        `versions_of_silver`: the versions that batches have made.
        """
        return [
            self._late_born(rows, versions_of_silver)
            for record, rows in self._by_record.items()
            if record[-1]
        ]

    def became(self, row: JsonObject) -> JsonObject:
        """Return what has become of a late record, a row of `late`, and a sentence that says so.

        `corrected` has event time, `is_late_born` and version of what it corrected; null where it
        has corrected nothing, or not yet.
        """
        correction = self._by_late.get(_late_of(row))
        if correction is None:
            return {"u": row["u"], "corrected": None, "outcome": self._why_none(row)}
        names = ("event_time", "is_late_born", "version")
        kind = "the late-born record" if correction["is_late_born"] else "the merge record"
        if correction["invalid_reason"] == EXCESS and not correction["version"]:
            outcome = (
                f"not corrected: {kind} of {utc(correction['event_time'])} is too large, or would "
                "be with it (merge.max_parts, merge.max_bytes)"
            )
            return {"u": row["u"], "corrected": None, "outcome": outcome}
        if not correction["version"]:
            outcome = (
                f"not corrected: {kind} of {utc(correction['event_time'])} has as many versions as "
                f"publish.corrections.max_versions lets it have ({TOO_MANY})"
            )
            return {"u": row["u"], "corrected": None, "outcome": outcome}
        outcome = (
            f"version {correction['version']} of {kind} of {utc(correction['event_time'])} has it"
        )
        corrected = {name: correction[name] for name in names}
        return {"u": row["u"], "corrected": corrected, "outcome": outcome}

    def _why_none(self, row: JsonObject) -> str:
        if row["u"] is None:
            return "not corrected: further behind than publish.corrections.within, or without it"
        if _late_of(row) in self._repeated:
            return "not corrected: its merge record has a part with its id"
        # Nothing that is not settled yet is so old: `keep.silver` is larger than `within`.
        if row["event_time"] < self._deleted_until.get(row["partition"], row["event_time"]):
            return "settled; `keep` has deleted what came of it"
        if row["generation"] != self._generations.newest.number:
            return "not corrected: its generation ended before it was settled"
        return f"settled once the clock has passed {utc(row['u'])}"

    def _version(self, row: JsonObject) -> JsonObject:
        late = ("source", "topic", "partition", "offset", "settled_at")
        names = ("version", *late, "valid", "invalid_reason")
        headers = {ID: row["id"], VERSION: str(row["version"])}
        return {
            **{name: row[name] for name in names},
            "published": self._sent.sent_as(row, headers),
        }

    def _late_born(
        self, rows: Sequence[JsonObject], versions_of_silver: BatchVersions
    ) -> JsonObject:
        newest = rows[-1]
        names = ("partition", "event_time", "last_event_time")
        tenant = {"tenant": newest["tenant"]} if newest["tenant"] else {}
        parts = []
        for input_id, offset, event_time in newest["parts"]:
            # `keep` may have deleted the version of an earlier part, the first one's, too.
            late = newest["generation"], newest["partition"], input_id, offset
            came = self._by_late.get(late, _DELETED)
            source, topic = input_id
            own_id = late_born_id(source, topic, newest["partition"], offset)
            parts.append(
                {
                    **input_id._asdict(),
                    "partition": newest["partition"],
                    "offset": offset,
                    "event_time": event_time,
                    "position": came["position"],
                    "batch": came["batch"],
                    "version": versions_of_silver.of(came["batch"]),
                    "rule": "opened" if newest["id"] == own_id else "joined",
                }
            )
        return {
            **{name: newest[name] for name in names},
            "status": "late_born",
            "valid": newest["valid"],
            "invalid_reason": newest["invalid_reason"],
            "reason": _WHY_LATE_BORN,
            "parts": parts,
            "closed": None,
            **tenant,
            "published": None,
            "versions": [self._version(row) for row in rows],
        }


def _record_of(row: JsonObject) -> _Record:
    names = ("generation", "partition", "tenant", "event_time")
    generation, partition, tenant, event_time = (row[name] for name in names)
    return generation, partition, tenant, event_time, row["id"] if row.get("is_late_born") else ""


def _late_of(row: JsonObject) -> _Late:
    input_id = InputId(row["source"], row["topic"])
    return row["generation"], row["partition"], input_id, row["offset"]
