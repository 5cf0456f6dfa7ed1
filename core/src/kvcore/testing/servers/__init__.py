"""Real servers for tests: each on loopback, on a free port, ended with the test. No mocks."""

from kvcore.testing.servers.process import Server, ServerError, free_port, listens

__all__ = ["Server", "ServerError", "free_port", "listens"]
