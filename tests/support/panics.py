"""What a library that is written in Rust, such as delta-rs, raises where Rust panics."""

from __future__ import annotations


class PanicException(BaseException):
    """No Exception, as in pyo3."""
