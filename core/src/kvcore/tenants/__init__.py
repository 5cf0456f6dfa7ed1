"""Tenants: how much of a place (L1, or a tier) each holds and can rely on, and who gives when room is needed."""

from kvcore.tenants.shares import Account, Division, Shares, Usage

__all__ = ["Account", "Division", "Shares", "Usage"]
