"""What the layers and `run` are made of: where reading begins, plans, streams that follow each other, owners."""
