"""Expectations on the data of a lake, checked by Great Expectations: `suites` (what is expected, of which table), `rows` (what is
new there), `evaluate` (what becomes of each expectation), `check` (one check of everything), `beside` (checks beside a run) and
`page` (the same for those who own the data).
"""
