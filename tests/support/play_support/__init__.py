"""Plays: an engine and a worker run up to a step, and a test then makes that step wrong."""
