"""The kernels of the device's scheduler, compiled for an H100 on a machine without one.

    python -m kernel_support.device commit_kernel    (TRITON_INTERPRET unset)

Prints a JSON list of `Compiled`, one for each config.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from blockstep.impl.device import layout
from blockstep.impl.device.launch import OPTIONS
from blockstep.spec.vocabulary import Config, Policy, SpecMethod
from kernel_support.compiled import Compiled, read_resources

EVERYTHING: Final[Mapping[str, Any]] = {
    "policy": Policy.PRIORITY,
    "async_scheduling": True,
    "max_frames_in_flight": 2,
    "spec_method": SpecMethod.EAGLE,
    "num_speculative_tokens": 4,
}
CONFIGS: Final = {
    "plain 1024": Config(num_blocks=65_536, max_num_seqs=1_024),
    "everything 1024": Config(num_blocks=65_536, max_num_seqs=1_024, **EVERYTHING),
    "everything 64": Config(num_blocks=4_096, max_num_seqs=64, **EVERYTHING),
}
"""By name."""


def compile_for(name: str, config: Config, kernel: str) -> Compiled:
    """One kernel of `step`, as a launch would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from blockstep.impl.device import step

    dims = layout.make_dims(config, slots=2 * config.max_num_seqs, lanes=256)
    types = ["*i64" if field in layout.INT64S else "*i32" for field in layout.State._fields]
    source = ASTSource(
        fn=getattr(step, kernel),
        signature={"s": layout.State(*types), "d": "constexpr"},
        constexprs={(1,): dims},
    )
    start = time.perf_counter()
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(OPTIONS))
    seconds = round(time.perf_counter() - start, 2)
    registers, stack = read_resources(made.asm["cubin"])
    return Compiled(name, kernel, registers, stack, made.metadata.shared, seconds)


if __name__ == "__main__":
    made = [asdict(compile_for(name, CONFIGS[name], sys.argv[1])) for name in sys.argv[2:]]
    sys.stdout.write(json.dumps(made) + "\n")
