"""Keeps the schemas of a source's records, and waits for those that its registry does not have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from watersmeet.core.avro_schema import MAX_SCHEMAS, MAX_SCHEMAS_BYTES, UNKNOWN
from watersmeet.errors import unknown_schema_of
from watersmeet.kafka.registry import Registry
from watersmeet.lake import tables
from watersmeet.lake.schemas import FULL, KeptSchemas
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet")


class NoRoomError(Exception):
    """Error for a batch with a schema for which the source has no room: it is to be read again."""


@dataclass
class WriterSchemas:
    """The rows of `writer_schemas` for a source. Records name no schemas without a registry.

    A schema that the registry does not have stops the input until it is there. After
    `registry.unknown_after` it is given up, for good: its records are then refused.

    A source takes the first schemas that its records name, up to `MAX_SCHEMAS` of them, or
    `MAX_SCHEMAS_BYTES`. Which these are is kept, so it is decided once, whatever reads them again.
    """

    owner: Owner
    settings: Settings
    source: str
    given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    allowed: frozenset[int] | None = None
    """Ids of the only schemas that records may be written with; None while there is room."""
    _sizes: dict[int, int] = field(default_factory=dict)
    """Length of each schema that `writer_schemas` is known to have."""
    _waiting_since: int | None = None
    """Time (epoch ms) since which the input has waited for schemas that the registry does not have.
    """

    def recover(self) -> None:
        """Read which schemas the lake has given up, and whether it takes further ones."""
        kept = self._kept()
        if self._unknown_after_ms is not None:
            self.given_up |= kept.given_up
        if FULL in kept:
            self.allowed = frozenset(self._sizes)

    def keep(self, ids: Sequence[int]) -> None:
        """Add the schemas with these ids to `writer_schemas`, if it lacks them.

        Raises NoRoomError if not all of them have room there: the first ones are added.
        """
        if self.allowed is not None or self._sizes.keys() >= {*ids}:
            return
        known = {*self._kept()}
        registry = Registry(self.settings.registries[self.source], self.given_up)
        texts: dict[int, str | None] = {}
        size = sum(self._sizes.values())
        for schema_id in ids:
            if schema_id in self._sizes:
                continue
            if FULL in known or (schema_id not in known and len(known) >= MAX_SCHEMAS):
                texts[FULL] = UNKNOWN
                break
            text = registry[schema_id]
            if text == UNKNOWN:
                continue
            size += len(text)
            if size > MAX_SCHEMAS_BYTES:
                texts[FULL] = UNKNOWN
                break
            texts[schema_id] = text
            known.add(schema_id)
        if texts:
            self._note(texts)
        if FULL in texts:
            log.warning("%s takes no further schemas: records of others are refused", self.source)
            raise NoRoomError
        self._sizes |= {schema_id: len(text or "") for schema_id, text in texts.items()}

    def _kept(self) -> KeptSchemas:
        """Return the schemas that the lake keeps by now, and note their sizes."""
        kept = KeptSchemas(self.owner.engine.reader, self.source)
        self._sizes |= {schema_id: len(text) for schema_id, text in kept.items() if text}
        return kept

    def note_failure(self, failure: Exception) -> bool:
        """Note which schema the registry did not have, and since when, if that was the failure.

        Once the input has waited for `registry.unknown_after`, the schema is given up. Return True
        if it is, or if there was no room for a schema: reading that begins again does without it.
        """
        if isinstance(failure, NoRoomError):
            return True
        schema_id = unknown_schema_of(failure)
        if schema_id is None:
            return False
        if schema_id in self.given_up:
            return True
        now = now_ms()
        kept = self._kept()
        since = kept.waiting.get(schema_id)
        if since is None:
            if len(kept) >= MAX_SCHEMAS:
                self._note({FULL: UNKNOWN})
                return True
            since = now
            self._note({schema_id: None})
        self._waiting_since = min(since, self._waiting_since or since)
        after_ms = self._unknown_after_ms
        if after_ms is None or now - self._waiting_since < after_ms:
            return False
        self.given_up.add(schema_id)
        self._note({schema_id: UNKNOWN})
        log.warning(
            "%s no longer waits for schema %d, which its registry did not have for "
            "registry.unknown_after: its records are refused",
            self.source,
            schema_id,
        )
        return True

    def note_success(self) -> None:
        """Note that the input waits for no schema."""
        self._waiting_since = None

    def _note(self, texts: Mapping[int, str | None]) -> None:
        """Append schemas to `writer_schemas`, by id: their text, None or `UNKNOWN`.

        None: the source waits for the schema. `UNKNOWN`: it no longer does.
        """
        rows = [(self.source, schema_id, text, now_ms()) for schema_id, text in texts.items()]
        engine = self.owner.engine
        engine.append(tables.WRITER_SCHEMAS, engine.lake.layout[tables.WRITER_SCHEMAS].rows(rows))

    @property
    def _unknown_after_ms(self) -> int | None:
        return self.settings.sources[self.source].unknown_after_ms
