"""Beside: state machines that a step uses and that know no scheduler state."""
