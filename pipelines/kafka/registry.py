"""Schemas in a registry of Confluent's API, by confluent-kafka's own client, whose options are passed on as they are."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from pipelines.configuration.sources import RegistrySettings
from pipelines.core.avro_schema import AvroSchema, self_contained
from pipelines.core.reading import ReadingRules
from pipelines.errors import (
    ConfigurationError,
    RegistryAccessError,
    RegistryUnreachableError,
    UnknownWriterSchemaError,
    missing_package,
)
from pipelines.kafka.cluster import TIMEOUT_S
from pipelines.settings import Settings

_NOT_FOUND: Final = 404
_REFUSALS: Final = frozenset([401, 403, 407])

_clients: dict[tuple[int, str], Any] = {}
_texts: dict[str, dict[int, str]] = {}
"""By registry: an id stands for the same schema for ever, so nothing is asked for twice by a process."""


def rules_of(settings: Settings, source: str) -> ReadingRules:
    """How a source's records are read, with the schemas of their writers where a registry has them."""
    of_source = settings.sources[source]
    rules = settings.reading_rules(source)
    if isinstance(rules.schema, AvroSchema) and of_source.registry is not None:
        rules = replace(rules, schema=replace(rules.schema, writers=Registry(of_source.registry)))
    return rules


class Registry(Mapping[int, str]):
    """By id, the schemas of a registry, each with all that it refers to. It pickles; each process has a client of its own.

    To ask for one raises UnknownWriterSchemaError where there is none, RegistryAccessError where the client is refused,
    RegistryUnreachableError where there is no answer, and ConfigurationError for options that the client does not take.
    """

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings, self._name = settings, settings.model_dump_json()

    def __getitem__(self, schema_id: int) -> str:
        known = _texts.setdefault(self._name, {})
        if schema_id not in known:
            known[schema_id] = self._fetched(schema_id)
        return known[schema_id]

    def __iter__(self) -> Iterator[int]:
        return iter(_texts.get(self._name, {}))

    def __len__(self) -> int:
        return len(_texts.get(self._name, {}))

    def check_options(self) -> None:
        """Raises ConfigurationError for options that the client does not take; the registry is not asked."""
        self._client()

    def check(self) -> None:
        """Raises as asking for a schema does where the registry cannot be used."""
        self._ask(lambda client: client.get_schema_types(), 0)

    def _fetched(self, schema_id: int) -> str:
        def fetch(client: Any) -> str:
            """The text of the schema with this id, which names no other schema. Raises what the registry's client raises."""
            schema = client.get_schema(schema_id)
            references: dict[tuple[str, int], str] = {}
            _collect(client, schema.references or [], references)
            return self_contained(schema.schema_str, list(references.values()))

        return str(self._ask(fetch, schema_id))

    def _ask(self, question: Any, schema_id: int) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryError  # takes a quarter of a second

        url = self._settings.url
        try:
            return question(self._client())
        except SchemaRegistryError as error:
            if error.http_status_code == _NOT_FOUND:
                raise UnknownWriterSchemaError(url, schema_id) from None
            if error.http_status_code in _REFUSALS:
                raise RegistryAccessError(url, f"HTTP status {error.http_status_code}") from None
            raise RegistryUnreachableError(url, f"HTTP status {error.http_status_code}") from None
        except ConfigurationError:
            raise
        except Exception as error:  # the HTTP library's errors, which is another one for other versions of the client
            if _is_about_certificates(error):
                raise RegistryAccessError(url, "TLS") from None
            raise RegistryUnreachableError(url, type(error).__name__) from None

    def _client(self) -> Any:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as error:
            raise missing_package(error) or error from None

        if (client := _clients.get((os.getpid(), self._name))) is None:
            # The run itself waits, and tells that it does.
            own = {"url": self._settings.url, "timeout": TIMEOUT_S, "max.retries": 0}
            try:
                client = SchemaRegistryClient({**self._settings.options, **own})
            except (ValueError, TypeError) as error:  # they name options, never their values
                raise ConfigurationError(
                    f"the client of schema registries does not take its options ({error}); correct registry.options"
                ) from None
            except OSError:
                raise ConfigurationError("a file that registry.options name cannot be read; correct its path") from None
            _clients[os.getpid(), self._name] = client
        return client


def _collect(client: Any, references: list[Any], found: dict[tuple[str, int], str]) -> None:
    """Adds what references lead to, each after what it refers to itself."""
    for reference in references:
        at = (reference.subject, reference.version)
        if at not in found:
            schema = client.get_version(*at, deleted=True).schema
            _collect(client, schema.references or [], found)
            found[at] = schema.schema_str


def _is_about_certificates(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, ssl.SSLError) or _is_about_certificates(error.__cause__ or error.__context__))
