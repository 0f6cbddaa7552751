"""Judge: property checks, the witness worker and coverage goals."""
