"""What a developer starts with: an example to write, an embedded broker, a demo."""
