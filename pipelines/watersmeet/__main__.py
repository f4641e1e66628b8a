"""`python -m watersmeet` is the same as `watersmeet`."""

from watersmeet.cli import main

if __name__ == "__main__":  # a worker process imports it, too
    main()
