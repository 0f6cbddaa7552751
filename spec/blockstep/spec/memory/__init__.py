"""Memory: who holds which block."""
