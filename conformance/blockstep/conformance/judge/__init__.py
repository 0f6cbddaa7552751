"""Judge: what may be said of an engine."""
