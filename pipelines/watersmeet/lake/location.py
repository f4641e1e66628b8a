"""Location of a lake's tables: folders under a path or a URI, or tables of a catalog's schema.

Nothing is opened here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa

from watersmeet.lake.durable import Durability
from watersmeet.lake.tables import Table, layout
from watersmeet.lake.views import DerivedView, View, derived_views, views
from watersmeet.settings import CatalogLake, Settings

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_FILE_URI = re.compile(r"file:(?://(?:localhost)?)?(?=/)")
_NOT_BY_DELTA_RS = re.compile(r"[#?\[\]|^\\\x00-\x1f\x7f]|%[0-9A-Fa-f]{2}")
"""Characters that delta-rs cannot have in a path, or does not take literally."""
OPENED_BY_DELTA_RS = "without # ? [ ] | ^ \\, control characters or a % with two hexadecimal digits"
"""How a path is that has none of these, for the end of a sentence."""
_NOT_HADOOPS = "/Volumes/"
"""The beginning of paths that Databricks itself has, on each of its file systems."""
_DELTA_RS_SCHEMES = frozenset(["s3", "s3a", "abfs", "abfss", "az", "adl", "azure", "gs"])


def scheme_of(address: str) -> str | None:
    """Return the scheme of a URI in lower case.

    None for a path and for a `file:` URI, which both name a folder of this machine.
    """
    match = _SCHEME.match(address)
    return None if match is None or match[1].lower() == "file" else match[1].lower()


def has_store(address: str) -> bool:
    """Return True where an address is in an object store that is known without Spark."""
    return scheme_of(address) in _DELTA_RS_SCHEMES


def local_path(address: str) -> str:
    """Return the path that an address without a scheme names.

    `file:` is cut off, and nothing is decoded, as in Hadoop's paths.
    """
    return _FILE_URI.sub("", address, count=1)


def hadoop_path(address: str) -> str:
    """Return an address as Spark and Hadoop take it: without a scheme, it would be one of their
    default file system, which need not be this machine's.
    """
    is_path = scheme_of(address) is None and not address.startswith(_NOT_HADOOPS)
    return f"file:{local_path(address)}" if is_path else address


@dataclass(frozen=True)
class Lake:
    """The tables of one configuration.

    `external_tables`: by table name, another lake that has the table and is only read. A rebuild
    borrows bronze and the idle decisions of the lake that it checks.
    """

    settings: Settings
    external_tables: Mapping[str, Lake] = field(default_factory=dict)

    @cached_property
    def layout(self) -> dict[str, Table]:
        """Every table by name, as the configuration needs it."""
        return layout(self.settings)

    @cached_property
    def views(self) -> dict[str, View]:
        """Every view by name, as the configuration needs it."""
        own = views(self.settings)
        borrowed = {
            name: replace(view, parts=[replace(view.parts[0], table=name)])
            for name, view in own.items()
            if name in self.external_tables and view.is_of_one_table
        }
        return own | borrowed

    @cached_property
    def derived(self) -> dict[str, DerivedView]:
        """Every view of views by name."""
        return derived_views(self.settings)

    def schema(self, table: str) -> pa.Schema:
        """Return the columns of a table or a view."""
        view = self.views.get(table)
        return self.layout[table].schema if view is None else view.schema

    @property
    def is_catalog(self) -> bool:
        """True where the tables are in a schema of a catalog: they have a name and no path."""
        return isinstance(self.settings.lake, CatalogLake)

    @property
    def location(self) -> str:
        """The place of the lake, for messages: its path, URI, or `catalog.schema`."""
        location = self.settings.lake
        return (
            f"{location.catalog}.{location.schema_name}"
            if isinstance(location, CatalogLake)
            else location
        )

    @property
    def storage(self) -> Mapping[str, str]:
        """Options of the object store under delta-rs's names.

        None where the environment has them all.
        """
        return self.settings.storage

    @property
    def folder(self) -> Path | None:
        """The folder of this machine that has the tables' folders.

        None for a catalog, an object store, and a file system that Spark or Databricks opens.
        """
        location = self.settings.lake
        if isinstance(location, CatalogLake) or scheme_of(hadoop_path(location)) is not None:
            return None
        return None if location.startswith(_NOT_HADOOPS) else Path(local_path(location))

    @cached_property
    def durable(self) -> Durability:
        """What makes the commits of this lake durable before anything relies on them."""
        return Durability(self.folder if self.settings.durable else None)

    def owning_lake(self, table: str) -> Lake:
        """Return the lake that holds a table: this one, or the one it is borrowed from."""
        external = self.external_tables.get(table)
        return self if external is None else external.owning_lake(table)

    def address(self, table: str) -> str:
        """Return the path or URI `<lake>/<table>`, or the quoted name in the catalog.

        That of a view is the one of its (first) table.
        """
        owner = self.owning_lake(table)
        view = owner.views.get(table)
        return owner.own_address(table if view is None else view.parts[0].table)

    def own_address(self, name: str) -> str:
        """Return the address of a table of this lake, or of a view that its catalog has."""
        location = self.settings.lake
        if isinstance(location, CatalogLake):
            return f"`{location.catalog}`.`{location.schema_name}`.`{name}`"
        return f"{location}/{name}"

    @property
    def needs_spark(self) -> bool:
        """True where only Spark can open every table.

        One is in a catalog, or where delta-rs cannot go. It knows folders of this machine, except
        for a few characters in their path, and the common object stores.
        """
        location = self.settings.lake
        if isinstance(location, CatalogLake) or any(
            lake.needs_spark for lake in self.external_tables.values()
        ):
            return True
        scheme = scheme_of(location)
        return (
            _NOT_BY_DELTA_RS.search(location) is not None
            if scheme is None
            else scheme not in _DELTA_RS_SCHEMES
        )
