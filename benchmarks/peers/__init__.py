"""Other programs that do the job, or a part of it, for comparison: `python -m benchmarks.peers.NAME
BOOTSTRAP FOLDER PARTITIONS [TIMEOUT_MS]`.

Each runs over everything that the topics hold, and ends. With a timeout, `merge_job` merges by it,
and runs on and on.
"""
