"""The lake: where its tables are and how they are laid out, small questions about them, and what keeps one writer at a time."""
