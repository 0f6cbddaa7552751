"""Numpied: runs a Triton kernel's source by numpy, thirty times faster than Triton's interpreter.

It is for kernels of one program that compute with integers. A kernel and the functions that it
calls are read as text, so that Triton is not needed. It supports what the compiler supports, too:
`tl.load` and `tl.store` at `tensor + offset`, masks, reductions and scans, atomics, `if`, `while`,
`for`, calls of other kernels. Anything else is refused by name and line when the text is read. It
needs numpy 2, whose types promote as Triton's do.

It can also simulate, on a CPU, what a GPU might do differently: see `Memory`, `HeldBack` and
`Watched`.
"""

from blockstep.kernels.numpied.load import Kernel, launch, load_kernels
from blockstep.kernels.numpied.memory import HeldBack, Memory, Watched
from blockstep.kernels.numpied.rewrite import RefusedError

__all__ = ["HeldBack", "Kernel", "Memory", "RefusedError", "Watched", "launch", "load_kernels"]
