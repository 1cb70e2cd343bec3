"""A pool of Ray actors that host engines."""
