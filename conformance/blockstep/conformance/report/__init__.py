"""Reports for people: a failure as a program and a diff, a verdict as a table."""
