"""Adapters: foreign engines behind the Engine protocol. Each is loaded by its name only."""
