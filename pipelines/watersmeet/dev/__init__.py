"""The first steps of a developer: an example to write, an embedded broker, a demo."""
