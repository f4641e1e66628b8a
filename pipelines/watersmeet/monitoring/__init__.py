"""The reports of a run: its events, and the metrics and log lines that are made of them."""
