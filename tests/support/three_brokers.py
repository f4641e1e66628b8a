"""A Kafka cluster of three brokers on this machine, of which two can be killed: the first is the
controller, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from watersmeet.dev import broker
from watersmeet.dev.processes import HOST, free_port

REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
CLUSTER = "d2F0ZXJzbWVldC10aHJlZQ"


@dataclass
class ThreeBrokers:
    """The brokers, by their folders; `servers` is where clients reach them."""

    folder: Path
    controller_port: int = field(default_factory=free_port)
    ports: dict[int, int] = field(default_factory=dict)

    @property
    def servers(self) -> str:
        return ",".join(f"{HOST}:{port}" for port in self.ports.values())

    def start(self, node: int) -> None:
        """Starts a broker, or starts it again with what it had."""
        port = self.ports.setdefault(node, free_port(self.controller_port, *self.ports.values()))
        client = f"CLIENT://{HOST}:{port}"
        roles = {
            "process.roles": "broker,controller" if node == 1 else "broker",
            "node.id": str(node),
        }
        listeners = f"{client},CONTROLLER://{HOST}:{self.controller_port}" if node == 1 else client
        of_node = {
            **roles,
            "listeners": listeners,
            "controller.quorum.voters": f"1@{HOST}:{self.controller_port}",
        }
        broker.start(
            self.folder / str(node), port, settings=REPLICATED | of_node, cluster_id=CLUSTER
        )

    def kill(self, node: int) -> None:
        """Ends a broker that has no chance to hand anything over."""
        found = broker.status(self.folder / str(node))
        assert found.pid is not None
        process = psutil.Process(found.pid)
        process.kill()
        process.wait(30)


@contextmanager
def three_brokers(folder: Path) -> Iterator[ThreeBrokers]:
    """Three brokers that run until the end of the block, but for those that are killed."""
    cluster = ThreeBrokers(folder)
    try:
        for node in (1, 2, 3):
            cluster.start(node)
        yield cluster
    finally:
        for node in (3, 2, 1):
            broker.stop(folder / str(node))
