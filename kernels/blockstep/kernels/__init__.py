"""Triton kernels with a torch reference beside each; they know no scheduler. Not built yet."""
