"""Property checks: `judge.checks` has all of them, and says in which order they are read."""
