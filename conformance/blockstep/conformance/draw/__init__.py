"""Draw: what is done to an engine."""
