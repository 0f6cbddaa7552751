"""What must be so before any test is imported.

Triton reads `TRITON_INTERPRET` when it is imported, for functions of its own, and transformers
imports it. Without a GPU all kernels are interpreted; what needs the compiler runs it in another
process.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
