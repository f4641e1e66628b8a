"""How the command line reads its arguments and prints its answers."""
