"""`python -m pipelines` is the same as `watersmeet`."""

from pipelines.cli import main

main()
