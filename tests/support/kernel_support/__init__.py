"""What the tests of the kernels share: oracles, sanitizers and the compiler without a GPU."""
