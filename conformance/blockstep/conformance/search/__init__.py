"""Search: many runs, and what to make of one that fails."""
