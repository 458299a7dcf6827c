"""Seeded generators of small tasks with exact answers."""
