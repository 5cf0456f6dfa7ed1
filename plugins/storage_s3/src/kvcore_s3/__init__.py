"""kvcore storage in S3 and what speaks its protocol."""

__version__ = "0.1.0"
