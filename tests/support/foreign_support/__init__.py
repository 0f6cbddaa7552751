"""Engines whose decisions differ from the specification's, as targets for the tools."""
