"""Engines that decide otherwise than the specification, for the tools to be tried on."""
