"""What operators do to a lake that lives: change its rules, reset, redrive, keep, forget."""
