"""Core: what every scheduler of this kind has. It names no feature and no release."""
