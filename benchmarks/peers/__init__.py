"""Other programs that do the job, or a part of it, for comparison: `python -m benchmarks.peers.NAME
BOOTSTRAP FOLDER PARTITIONS`.

Each runs over everything that the topics hold, and ends.
"""
