"""kvcore-otel: what a kvcore cache did for each request, as OpenTelemetry traces."""

__version__ = "0.1.0"
