"""Types and rules that all tools share: programs, findings, features, and the engine registry."""
