"""The answers of the command line about the embedded broker."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from watersmeet.dev import secure
from watersmeet.dev.broker import BrokerStatus
from watersmeet.kafka.permissions import Permission


def broker_facts(
    status: BrokerStatus, allowed: Sequence[Permission] | None = None
) -> dict[str, Any]:
    """Return the answer of `broker --json`.

    For a secured broker it says where its secrets are, and nothing of what they are.
    """
    names = ("running", "port", "pid")
    facts = {name: getattr(status, name) for name in names} | {
        "directory": str(status.directory),
        "secure": status.is_secured,
    }
    if status.is_secured:
        files = {
            "client": secure.client_file(status.directory),
            "password": secure.password_file(status.directory),
        }
        facts |= {
            "user": secure.USER,
            **{name: str(file) for name, file in files.items()},
            "admin_port": status.admin_port,
        }
    if allowed is not None:
        facts["allowed"] = [permission._asdict() for permission in allowed]
    return facts


def broker_view(facts: dict[str, Any]) -> str:
    """Return the answer of `broker_facts` for people: a line for each fact."""
    state = (
        f"running at 127.0.0.1:{facts['port']} (process {facts['pid']})"
        if facts["running"]
        else "not running"
    )
    lines = [f"{state}; data in {facts['directory']}"]
    if facts["secure"]:
        password = shlex.quote(facts["password"])
        lines += [
            f"section `kafka` for the configuration: {facts['client']}",
            f'password of {facts["user"]}: export {secure.PASSWORD_VARIABLE}="$(cat {password})"',
        ]
    lines += [
        f"{facts['user']} may {p['operation']} {p['kind']} {p['name']}: {p['why']}"
        for p in facts.get("allowed", ())
    ]
    return "\n".join(lines)
