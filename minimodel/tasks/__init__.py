"""Seeded generators of small tasks with exact answers."""

__all__ = ["meeting"]
