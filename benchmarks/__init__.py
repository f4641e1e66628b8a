"""The benchmarks behind `make bench`: eight points, each with its marks, measured on this
machine."""
