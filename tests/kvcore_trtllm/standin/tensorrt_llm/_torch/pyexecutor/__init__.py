"""Stand-in for tests: holds the connector interface."""
