"""Support for tests of kernels: oracles, sanitizers and the compiler without a GPU."""
