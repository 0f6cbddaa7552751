"""Launch: how a kernel is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from blockstep.impl.device.layout import Dims, State
from blockstep.kernels import numpied

Launch: TypeAlias = Callable[[str, State, Dims], None]
"""Runs a kernel of `step`, by its name, on a state of numpy arrays, which it changes."""
FOLDER: Final = Path(__file__).parent
MODULES: Final = (
    "pool", "contents", "lives", "commands", "running", "waiting", "results", "sweep", "inputs",
    "step",
)  # fmt: skip
"""The sources of the kernels; each calls those before it."""
OPTIONS: Final = {"num_warps": 8, "num_stages": 1, "maxnreg": 255}
"""One program has a multiprocessor for itself, so that registers cost nothing; and a load that is
prefetched would pass by the store before it."""


def list_files() -> Sequence[Path]:
    """The sources, those that are called first."""
    return [FOLDER / f"{module}.py" for module in MODULES]


class Numpied:
    """Runs the kernels' source by numpy.

    Args:
        memory: what loads and stores do; by default every store is seen at once.
        changed: texts that are read in the place of modules' own, by their names.
    """

    def __init__(
        self, memory: numpied.Memory | None = None, changed: Mapping[str, str] | None = None
    ) -> None:
        self.memory = numpied.Memory() if memory is None else memory
        texts = {FOLDER / f"{name}.py": text for name, text in (changed or {}).items()}
        self._kernels = numpied.load_kernels(list_files(), self.memory, texts)

    def __call__(self, kernel: str, state: State, dims: Dims) -> None:
        """Run one."""
        numpied.launch(self._kernels[kernel], self.memory, state, dims)


@cache
def get_numpied() -> Numpied:
    """The one that engines share: it keeps nothing between launches."""
    return Numpied()
