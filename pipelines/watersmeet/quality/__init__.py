"""Expectations on the data of a lake, checked by Great Expectations."""
