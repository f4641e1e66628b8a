"""The reading of the command line's arguments, and the printing of its answers."""
