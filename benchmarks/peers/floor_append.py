"""Floor B: Spark appends both topics to one Delta table, raw, and does nothing else."""

from __future__ import annotations

from benchmarks.peers.common import arguments, kafka_stream, peer_session, run


def main() -> None:
    """Appends everything available, and ends."""
    bootstrap_servers, folder, *_ = arguments()
    spark = peer_session()
    spark.conf.set("spark.databricks.delta.snapshotPartitions", "2")
    raw = kafka_stream(spark, bootstrap_servers, 500_000)
    run(raw.writeStream.format("delta").option("path", str(folder / "raw")), folder)
    spark.stop()


if __name__ == "__main__":
    main()
