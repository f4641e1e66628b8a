"""Floor A: Spark reads both topics, and throws every record away."""

from __future__ import annotations

from benchmarks.peers.common import arguments, kafka_stream, peer_session, run


def main() -> None:
    """Reads everything available, and ends."""
    bootstrap_servers, folder, *_ = arguments()
    spark = peer_session()
    run(kafka_stream(spark, bootstrap_servers).writeStream.format("noop"), folder)
    spark.stop()


if __name__ == "__main__":
    main()
