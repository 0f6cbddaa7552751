"""Step: the planning of one step, one concept per module."""
