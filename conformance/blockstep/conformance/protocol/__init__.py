"""Protocol: the words that every tool talks in, and where an engine is looked up."""
