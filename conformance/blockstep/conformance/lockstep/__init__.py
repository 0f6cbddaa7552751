"""Lockstep: specification, engine and worker, event by event."""
