"""What a person sees: the failure as a program and a diff, the verdict as a table."""
