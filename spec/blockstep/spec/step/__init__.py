"""Step: one step of the schedule, one concept a module."""
