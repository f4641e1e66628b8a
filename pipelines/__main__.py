"""`python -m pipelines` is the same as `watersmeet`."""

from pipelines.cli import main

if __name__ == "__main__":  # a worker process imports it, too
    main()
