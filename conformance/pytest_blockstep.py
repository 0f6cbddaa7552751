"""The pytest plugin as its distribution names it.

pytest rewrites the assertions of all top-level modules in the distribution of a plugin. It finds
none in a namespace package, and then takes `__main__`, `spec` and `kernels` for such modules: it
would warn of `__main__` in every project that has Blockstep installed. This module is one.

PYTEST_DONT_REWRITE: it has no assertions.
"""

from blockstep.conformance import pytest_plugin as plugin

__all__ = ["plugin"]
