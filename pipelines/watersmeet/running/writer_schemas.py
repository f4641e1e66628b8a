"""Keeps the schemas of a source's records, and waits for those that its registry does not have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from watersmeet.core.avro_schema import MAX_SCHEMAS, MAX_SCHEMAS_BYTES, UNKNOWN, is_same
from watersmeet.errors import OtherWriterSchemaError, unknown_schema_of
from watersmeet.kafka.registry import Registry
from watersmeet.lake import tables
from watersmeet.lake.schemas import FULL, KeptSchemas
from watersmeet.running.owner import Owner, now_ms
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet")


class ReadAgainError(Exception):
    """Error for a batch with a schema for which the source has no room, or that was given up and is
    there now: it is to be read again.
    """


@dataclass
class WriterSchemas:
    """The rows of `writer_schemas` for a source. Records name no schemas without a registry.

    A schema that the registry does not have stops the input until it is there. After
    `registry.unknown_after` it is given up: its records are then refused, until it is there. One
    that the lake has stands for ever: records of it are read by it, whatever the registry says now.

    A source takes the first schemas that its records name, up to `MAX_SCHEMAS` of them, or
    `MAX_SCHEMAS_BYTES`. Which these are is kept, so it is decided once, whatever reads them again.
    """

    owner: Owner
    settings: Settings
    source: str
    given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    is_full: bool = False
    """True where records may be written with no other schemas than those that the lake has."""
    _kept: dict[int, str] = field(default_factory=dict)
    """The schemas that `writer_schemas` is known to have, by id."""
    _checked: set[int] = field(default_factory=set)
    """Ids of those that the registry was asked for, too."""
    _waiting_since: int | None = None
    """Time (epoch ms) since which the input has waited for schemas that the registry does not have.
    """

    def recover(self) -> None:
        """Read which schemas the lake has given up, and whether it takes further ones."""
        kept = self._read()
        if self._unknown_after_ms is not None:
            self.given_up |= kept.given_up
        self.is_full = FULL in kept

    @property
    def texts(self) -> dict[int, str]:
        """The schemas by id that records are read by, `UNKNOWN` for those that are given up."""
        given_up = () if self.is_full else self.given_up
        return {**dict.fromkeys(given_up, UNKNOWN), **self._kept}

    def keep(self, ids: Sequence[int]) -> None:
        """Add the schemas with these ids to `writer_schemas`, if it lacks them.

        Raises ReadAgainError if not all of them have room there, in which case the first ones are
        added, or if one of them had been given up; OtherWriterSchemaError if the registry has
        another one than the lake.
        """
        ids = [i for i in ids if i not in self._checked and (i in self._kept or not self.is_full)]
        if not ids:
            return
        known = {*self._read()}
        registry_settings = self.settings.registries[self.source]
        registry = Registry(registry_settings, self.given_up | self._kept.keys())
        for schema_id in self._kept.keys() & ids:
            self._check(schema_id, registry[schema_id])
        texts = self._new_texts([i for i in ids if i not in self._kept], known, registry)
        if texts:
            self._note(texts)
        if FULL in texts:
            log.warning("%s takes no further schemas: records of others are refused", self.source)
            raise ReadAgainError
        self._kept |= texts
        self._checked |= texts.keys()
        if not self.given_up.isdisjoint(texts):
            raise ReadAgainError

    def _check(self, schema_id: int, text: str) -> None:
        # Where the registry no longer has a schema, the lake's own stands.
        if text != UNKNOWN and not is_same(text, self._kept[schema_id]):
            raise OtherWriterSchemaError(self.settings.registries[self.source].url, schema_id)
        self._checked.add(schema_id)

    def _new_texts(self, ids: Sequence[int], known: set[int], registry: Registry) -> dict[int, str]:
        # `FULL` is among them where not all have room.
        texts: dict[int, str] = {}
        size = sum(map(len, self._kept.values()))
        for schema_id in ids:
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
        return texts

    def _read(self) -> KeptSchemas:
        """Return the schemas that the lake keeps by now, and note their texts."""
        kept = KeptSchemas(self.owner.engine.reader, self.source)
        self._kept |= {schema_id: text for schema_id, text in kept.items() if text}
        return kept

    def note_failure(self, failure: Exception) -> bool:
        """Note which schema the registry did not have, and since when, if that was the failure.

        Once the input has waited for `registry.unknown_after`, the schema is given up. Return True
        if it is, or if there was no room for a schema: reading that begins again does without it.
        """
        if isinstance(failure, ReadAgainError):
            return True
        schema_id = unknown_schema_of(failure)
        if schema_id is None:
            return False
        if schema_id in self.given_up:
            return True
        now = now_ms()
        kept = self._read()
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

    def _note(self, texts: Mapping[int, str | None] | Mapping[int, str]) -> None:
        """Append schemas to `writer_schemas`, by id: their text, None or `UNKNOWN`.

        None: the source waits for the schema. `UNKNOWN`: it no longer does.
        """
        rows = [(self.source, schema_id, text, now_ms()) for schema_id, text in texts.items()]
        engine = self.owner.engine
        engine.append(tables.WRITER_SCHEMAS, engine.lake.layout[tables.WRITER_SCHEMAS].rows(rows))

    @property
    def _unknown_after_ms(self) -> int | None:
        return self.settings.sources[self.source].unknown_after_ms
