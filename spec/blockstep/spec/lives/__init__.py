"""Lives: what happens to a request between two steps."""
