"""Recorded: runs that happened elsewhere."""
