"""The demo: a real clickstream through a real broker and the three layers, and what a newcomer wants to see of it."""

from pipelines.demo.show import run_demo

__all__ = ["run_demo"]
