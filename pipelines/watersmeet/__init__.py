"""Watersmeet merges Kafka topics by event time on Spark and Delta Lake and publishes each finished
record once, in order."""

__version__ = "0.1.0"
