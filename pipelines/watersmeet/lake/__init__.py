"""The lake: location and layout of its tables, small queries, and leases for a single writer."""
