"""Engines of others behind adapters, and ours while they serve."""
