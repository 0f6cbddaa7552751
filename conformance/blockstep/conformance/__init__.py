"""The tools that hold an implementation to the specification, step by step. PYTEST_DONT_REWRITE."""

from blockstep.conformance.moved import install

install()
