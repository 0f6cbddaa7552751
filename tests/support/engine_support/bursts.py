"""A scheduler's state in the middle of a burst, made by drawing it."""

from __future__ import annotations

import torch

from blockstep.impl.device import layout
from blockstep.impl.device.dims import make_dims
from blockstep.impl.engine.bursts import BurstMemory
from blockstep.impl.engine.slots import SlotParams
from blockstep.spec.vocabulary import Config

FRAME_ID, FIRST_ID = 7, 5


def draw_memory(
    num_rows: int, *, width: int, frames: int, groups: int, seed: int = 0, lanes: int = 16
) -> BurstMemory:
    """Return the memory of a burst after the scheduler has planned `num_rows` rows.

    Requests are at any index; some have a token that the plan before samples, some one that an
    older plan samples, if there are frames enough.
    """
    draw = torch.Generator().manual_seed(seed)
    config = Config(
        num_blocks=60, block_size=4, max_num_seqs=max(width, 2), max_num_batched_tokens=64,
        max_model_len=90, max_frames_in_flight=frames, async_scheduling=frames > 1,
    )  # fmt: skip
    d = make_dims(config, slots=2 * width + 3, lanes=lanes)._replace(groups=groups)
    state = layout.State(*map(torch.from_numpy, layout.make_state(d)))

    def fill(tensor: torch.Tensor, high: int) -> None:
        tensor.copy_(torch.randint(0, high, tensor.shape, generator=draw))

    for name, high in (
        ("tokens", 999), ("tables", 60), ("slot_mapping", 240), ("record", 3), ("is_prefill", 2),
        ("num_free", 60), ("num_free_nodes", 60), ("num_preempted", 3), ("plan_rows", width + 1),
        ("end_by_max_tokens", 200), ("plans", 2),
    ):  # fmt: skip
        fill(getattr(state, name), high)
    state.control[layout.FRAME_ID], state.control[layout.FIRST_ID] = FRAME_ID, FIRST_ID
    state.control[layout.PLACE] = torch.randint(0, frames, (), generator=draw)
    for frame in range(frames):
        state.plans[frame, layout.ROW_SLOT] = torch.randperm(d.slots, generator=draw)[: d.rows]
    state.query_start_loc.copy_(torch.arange(d.rows + 1))
    state.key[:] = torch.where(torch.arange(d.slots) % 3 == 0, 5, layout.FAR)
    params = SlotParams(d.slots, (), torch.device("cpu"))
    fill(params.floats, 9)
    fill(params.ints, 9)
    memory = BurstMemory.make(state, d, config.max_model_len, params, steps=4, widest=width)
    fill(memory.sampled, 999)
    fill(memory.rows, 50)
    draw_plan(memory, num_rows, draw)
    return memory


def draw_plan(memory: BurstMemory, num_rows: int, draw: torch.Generator) -> None:
    """Plan a step of one token each for `num_rows` requests; the next frame's place has them."""
    state, d = memory.state, memory.dims
    place = int(state.control[layout.PLACE])
    state.control[layout.PLACE] = (place + (num_rows > 0)) % d.frames
    state.num_rows[0] = state.num_running[0] = num_rows
    order = state.plans[place, layout.ROW_SLOT]
    state.run.copy_(order)
    if num_rows:
        state.plan_rows[place] = num_rows
    state.positions[: d.rows] = torch.randint(0, 90, (d.rows,), generator=draw)
    state.seq_lens.copy_(state.positions[: d.rows] + 1)
    at = order[:num_rows].long()
    state.known[at] = state.positions[:num_rows].int() + 1
    if d.frames > 1:
        state.known[at[::2]] -= 1
