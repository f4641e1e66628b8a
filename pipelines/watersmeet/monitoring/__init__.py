"""The reports of a run while it works: its events, and the metrics and log lines that are made of
them.
"""
