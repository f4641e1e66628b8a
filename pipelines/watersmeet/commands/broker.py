"""The commands of the embedded broker: `watersmeet broker start`, `send`, `stop` and `status`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from watersmeet.commands.arguments import DEFAULT_CONFIG, Config, Json, as_local
from watersmeet.commands.usage import new_app, show_help_alone
from watersmeet.monitoring.observability import working
from watersmeet.output import answer
from watersmeet.settings import load_settings

if TYPE_CHECKING:
    from watersmeet.dev.broker import BrokerStatus
    from watersmeet.kafka.permissions import Permission

broker_app = new_app(help="The embedded single-node Kafka, for development.")
broker_app.callback()(show_help_alone)

Directory = Annotated[Path, typer.Option("--dir", help="The broker's folder.", callback=as_local)]
DEFAULT_BROKER = Path("broker")


@broker_app.command()
def start(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Default: the last one used here, or a free one."),
    ] = None,
    directory: Directory = DEFAULT_BROKER,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure",
            help="Ask for a password over TLS, and allow just what the configuration needs.",
        ),
    ] = False,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Start the broker, and return once it answers."""
    from watersmeet.dev import broker

    with working("waits for the broker to start"):
        allowed = _permissions(config) if secure else None
        started = broker.start(directory, port, secure=secure, allowed=allowed or ())
    _show_broker(started, as_json, allowed)


@broker_app.command()
def send(
    file: Annotated[
        Path, typer.Argument(help="A file with a record in each line, as `watersmeet try` has it.")
    ],
    directory: Directory = DEFAULT_BROKER,
    config: Config = DEFAULT_CONFIG,
    as_json: Json = False,
) -> None:
    """Send the records of a file to the broker, and create the topics of the configuration's
    sources that it lacks."""
    from watersmeet.dev.send import send_file, send_view

    with working("sends the records"):
        sent = send_file(load_settings(config), file, directory)
    answer(sent, as_json, send_view)


@broker_app.command()
def stop(directory: Directory = DEFAULT_BROKER, as_json: Json = False) -> None:
    """Stop the broker; its data stays."""
    from watersmeet.dev import broker

    with working("waits for the broker to stop"):
        stopped = broker.stop(directory)
    _show_broker(stopped, as_json)


@broker_app.command("status")
def broker_status(directory: Directory = DEFAULT_BROKER, as_json: Json = False) -> None:
    """Say whether the broker runs, and where."""
    from watersmeet.dev import broker

    _show_broker(broker.status(directory), as_json)


def _permissions(config: Path) -> list[Permission]:
    # The password that the configuration names may not have been made yet.
    from watersmeet.dev.secure import PASSWORD_VARIABLE
    from watersmeet.kafka.permissions import permissions

    return permissions(load_settings(config, {PASSWORD_VARIABLE: "none yet", **os.environ}))


def _show_broker(
    status: BrokerStatus, as_json: bool, allowed: Sequence[Permission] | None = None
) -> None:
    from watersmeet.dev.broker import broker_facts, broker_view

    answer(broker_facts(status, allowed), as_json, broker_view)
