"""Floor B: one query of Spark appends both topics to one Delta table, raw, in one batch, and does
nothing else."""

from __future__ import annotations

from benchmarks.peers.common import arguments, kafka_stream, peer_session, run


def main() -> None:
    """Appends everything available, and ends."""
    bootstrap_servers, folder, *_ = arguments()
    # Delta reads its own log in 50 tasks, unless it is told that one will do.
    spark = peer_session({"spark.databricks.delta.snapshotPartitions": "1"})
    raw = kafka_stream(spark, bootstrap_servers)
    run(raw.writeStream.format("delta").option("path", str(folder / "raw")), folder)
    spark.stop()


if __name__ == "__main__":
    main()
