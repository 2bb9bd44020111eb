"""Where a non-finite value was born: its operation, line and module."""
