"""Adapters: the seats in which a worker keeps LoRA weights, one adapter each.

    running      [A: x] [B: -] [C: x] [D: y]        max_loras 2: the seats of x and y
    waiting      [E: z] [F: x] [G: -]               E is passed over, F and G are not

Who runs holds the seat of its adapter, together with all others of that adapter, whether or not a
step has a row of it; who is preempted, or ends, gives it up. So a frame names `max_loras` adapters
at most, whatever is in flight: a worker may load and drop at the beginning of each frame, and has
room (P9). Who would need one seat more is passed over and blocks nobody, before its hit is looked
for; all else of the step is as if it were not there (P7, P15).

Against starvation (P10) holds no more than this: only who brings no new adapter overtakes it. The
first in line that needs a seat gets the next one that is given up, for whoever came later is looked
at later. Each request that runs ends, so it waits for ever only if requests of the very adapters
that are in use never cease to come.
"""

from __future__ import annotations

from collections.abc import Collection


def has_seat(adapter: str | None, in_use: Collection[str | None], max_loras: int) -> bool:
    """Whether a request of this adapter may join those that run; None needs no seat.

    Source: vLLM 0.19.1 `schedule`; P9, P15.
    """
    if adapter is None or max_loras == 0:
        return True
    in_use = set(in_use) - {None}
    return is_within_max_loras(len(in_use), adapter in in_use, max_loras)


def is_within_max_loras(num_in_use: int, is_in_use: bool, max_loras: int) -> bool:
    """Whether one adapter more, or one of them once more, leaves them within `max_loras`.

    Source: vLLM 0.19.1 `schedule`; P9.
    """
    return is_in_use or num_in_use < max_loras
