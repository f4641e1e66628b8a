"""The fault points (`watersmeet.faults`) in the order in which they are reached."""

from __future__ import annotations

from typing import Final

POINTS: Final = (
    "bronze.append",  # a micro-batch was read, nothing of it is written
    "bronze.done",  # all of it is written, and the stream's query does not know yet
    "idle.decide",  # a source is found idle, and no batch has its decision
    "silver.merge",  # a batch is planned, nothing of it is written
    "silver.done",  # all of it is written, and gold does not know
    # An earlier publisher is fenced, its transaction aborted, the sink's tails are not read.
    "publisher.begin",
    "gold.publish",  # what is to be published is known, no transaction has begun
    "publisher.produce",  # a transaction has begun, the next chunk of its messages is not produced
    "publisher.commit",  # every message has reached the broker, the transaction is open
    "publisher.committed",  # the transaction is committed, and nothing in the lake says so
    "gold.note",  # the same for gold: `published` lacks the rows
    "gold.done",  # all is noted
    "letters.publish",  # the dead letters to send are known, no transaction has begun
    "letters.note",  # their transaction is committed, published lacks the rows
)
"""Every point of a run, in the order of the pipeline."""

IN_EVOLVE: Final = (
    "evolve.epoch",  # the layers are taken, the next epoch is not recorded
    "evolve.release",  # it is recorded, and `leases` says that the command is at work
)
"""Every point of `evolve`."""

IN_BEGINNING: Final = (
    "beginning.known",  # what a generation must know of published messages is not written
    "beginning.decide",  # that is written, and the generation is not committed
)
"""Every point where a generation begins: at the first start of a lake, or in `reset`."""

IN_RESET: Final = (
    "reset.read",  # records that bronze lacks were read, and are not written
    *IN_BEGINNING,
    "reset.close",  # the generation is committed, and rows of the one before are still open
    "reset.told",  # they are closed, and `resets` does not have the reset
)
"""Every point of `reset`."""

IN_FORGET: Final = "forget.erase"
"""The point of `forget`: its next commit is not made yet, the commits before it are."""
