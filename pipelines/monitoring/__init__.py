"""What a run tells while it works: its events, and the metrics and log lines that are made of them."""
