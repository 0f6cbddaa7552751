"""Engines: those of others behind adapters, and ours while they serve."""
