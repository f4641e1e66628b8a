"""Keeps the schemas of a source's records, and waits for those that its registry does not have."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from watersmeet.core.avro_schema import UNKNOWN
from watersmeet.errors import unknown_schema_of
from watersmeet.kafka.registry import Registry
from watersmeet.lake import tables
from watersmeet.lake.schemas import given_up_schemas, known_schemas, unknown_schemas
from watersmeet.lake.table_reader import TableReader
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet")


@dataclass
class WriterSchemas:
    """The rows of `writer_schemas` for a source. Records name no schemas without a registry.

    A schema that the registry does not have stops the input until it is there. After
    `registry.unknown_after` it is given up, for good: its records are then refused.
    """

    owner: Owner
    settings: Settings
    source: str
    given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    _kept: set[int] = field(default_factory=set)
    """Ids of schemas that `writer_schemas` is known to have."""
    _waiting_since: int | None = None
    """Time (epoch ms) since which the input has waited for schemas that the registry does not have.
    """

    def recover(self) -> None:
        """Read which schemas the lake has given up."""
        if self._unknown_after_ms is not None:
            self.given_up |= given_up_schemas(self._reader, self.source)

    def keep(self, schema_ids: Collection[int]) -> None:
        """Add the schemas with these ids to `writer_schemas`, if it lacks them."""
        new = set(schema_ids) - self._kept
        if not new:
            return
        existing = known_schemas(self._reader, self.source)
        new -= {schema_id for schema_id, text in existing.items() if text != UNKNOWN}
        schemas = Registry(self.settings.registries[self.source], self.given_up)
        texts = {
            schema_id: text for schema_id in sorted(new) if (text := schemas[schema_id]) != UNKNOWN
        }
        if texts:
            self._note(texts)
        self._kept |= set(schema_ids) - (new - texts.keys())

    def note_failure(self, failure: Exception) -> bool:
        """Note which schema the registry did not have, and since when, if that was the failure.

        Once the input has waited for `registry.unknown_after`, the schema is given up. Return True
        if it is: reading that begins again does without it.
        """
        schema_id = unknown_schema_of(failure)
        if schema_id is None:
            return False
        if schema_id in self.given_up:
            return True
        now = now_ms()
        since = unknown_schemas(self._reader, self.source).get(schema_id)
        if since is None:
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

    @property
    def _reader(self) -> TableReader:
        return self.owner.engine.reader
