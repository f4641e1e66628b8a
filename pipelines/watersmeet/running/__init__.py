"""Building blocks of the layers and of `run`: generations, plans, streams, owners."""
