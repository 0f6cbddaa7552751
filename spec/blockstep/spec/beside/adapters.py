"""Adapters: the slots in which a worker keeps LoRA weights, one adapter each.

    running      [A: x] [B: -] [C: x] [D: y]        max_loras 2: the LoRA slots of x and y
    waiting      [E: z] [F: x] [G: -]               E is skipped, F and G are not

Running requests of one adapter share its LoRA slot, whether or not a step has rows of them; a
request that is preempted, or finishes, leaves it. So a frame names at most `max_loras` adapters,
whatever is in flight: a worker may load and drop adapters at the beginning of each frame, and has
room (P9). A request that would need one slot more is skipped before its hit is looked for, and
blocks no other; the rest of the step is as if it were not there (P7, P15).

Starvation (P10) is limited as follows: only requests without a new adapter overtake a skipped one.
The first request in the queue that needs a slot gets the next one that becomes free, because later
ones are tried later. Each running request finishes, so it waits for ever only if requests of the
adapters in use never stop arriving.
"""

from __future__ import annotations

from collections.abc import Collection


def has_seat(adapter: str | None, in_use: Collection[str | None], max_loras: int) -> bool:
    """Whether a request of this adapter may join the running ones; None needs no slot.

    Source: vLLM 0.19.1 `schedule`; P9, P15.
    """
    if adapter is None or max_loras == 0:
        return True
    in_use = set(in_use) - {None}
    return is_within_max_loras(len(in_use), adapter in in_use, max_loras)


def is_within_max_loras(num_in_use: int, is_in_use: bool, max_loras: int) -> bool:
    """Whether the adapters stay within `max_loras` if one more request joins them.

    Source: vLLM 0.19.1 `schedule`; P9.
    """
    return is_in_use or num_in_use < max_loras
