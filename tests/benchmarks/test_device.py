"""The longest chain of a device step: it is counted right, and tracing changes nothing."""

from __future__ import annotations

import pytest
from benchmarks import device

from blockstep.impl.device import launch, layout
from blockstep.kernels.numpied import Memory

NUM_RUNNING = 4


def trace(
    changed: dict[str, str], *, follows_branches: bool, is_steady: bool = True
) -> tuple[device.Chains, layout.State]:
    """Trace a decode step, which takes the short path (`steady.py`) if it is steady."""
    memory = Memory()
    inbox = device.start(NUM_RUNNING, 64, memory)
    if not is_steady:
        inbox.state.steady[layout.STEPS_LEFT] = 0
    traced = launch.Numpied(memory, changed)
    chains = device.Chains(traced, follows_branches=follows_branches)
    traced("loop_kernel", inbox.state, inbox.dims)
    return chains, inbox.state


def test_tracing_a_step_does_not_change_it() -> None:
    inbox = device.start(NUM_RUNNING, 64, Memory())
    inbox.launch("loop_kernel")
    _, state = trace({}, follows_branches=True)
    for name, traced, plain in zip(state._fields, state, inbox.state, strict=True):
        assert (traced == plain).all(), name


LAST = {
    "short way": ("steady", "            done = 1\n", "s.num_free"),
    "long way": ("step", "    tl.store(s.in_flight, count + has_rows)\n", "s.num_rows"),
}
"""The last line of a step, and a number that the step has stored before."""


@pytest.mark.parametrize("way", LAST)
@pytest.mark.parametrize("follows_branches", [True, False])
def test_another_load_or_scan_at_the_end_of_the_chain_is_counted(
    follows_branches: bool, way: str
) -> None:
    """The last operation of a step is made to wait for a load of a value just stored."""
    module, own, stored = LAST[way]
    text = (launch.FOLDER / f"{module}.py").read_text()
    assert text.count(own) == 1
    indent = own[: len(own) - len(own.lstrip())]
    lines = [f"again = tl.load({stored})", *50 * ["again = tl.load(s.run + again * 0)"]]
    lines += ["scan = tl.arange(0, 4) + count", *50 * ["scan = tl.cumsum(scan * 0, 0)"]]
    planted = own + "".join(f"{indent}{line}\n" for line in lines)
    changed = {module: text.replace(own, planted)}
    is_steady = way == "short way"
    before, _ = trace({}, follows_branches=follows_branches, is_steady=is_steady)
    after, _ = trace(changed, follows_branches=follows_branches, is_steady=is_steady)
    assert after.longest[0] >= before.floor[0] + 51
    assert after.longest[1] >= before.floor[1] + 50
    assert after.longest[0] <= before.longest[0] + 51
    assert after.longest[1] <= before.longest[1] + 50
    assert after.num_scans == before.num_scans + 50
