"""Expectations on the data of a lake, checked by Great Expectations.

- `suites`: what is expected, of which table;
- `rows`: what is new there;
- `evaluate`: the outcome of each expectation;
- `check`: one check of everything;
- `beside`: checks beside a run;
- `page`: a check as a page for those who own the data.
"""
