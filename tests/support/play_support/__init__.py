"""A play: a clean engine with a worker beside it, up to a step that is then bent."""
