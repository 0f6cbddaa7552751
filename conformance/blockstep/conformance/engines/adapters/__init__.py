"""Adapters: engines of others behind the Engine protocol. Each is loaded by its name only."""
