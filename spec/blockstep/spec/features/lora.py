"""LoRA: the slots in which a worker keeps LoRA weights, one adapter each.

    running      [A: x] [B: -] [C: x] [D: y]        max_loras 2: the LoRA slots of x and y
    waiting      [E: z] [F: x] [G: -]               E is skipped, F and G are not

Running requests of one adapter share its LoRA slot, whether or not they have rows in a step; a
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
from typing import Final

from blockstep.spec.core.feature import Feature
from blockstep.spec.core.hooks import Hooks
from blockstep.spec.core.requests import RequestState
from blockstep.spec.core.state import State
from blockstep.spec.core.work import Step, Verdict
from blockstep.spec.vocabulary import Config, RequestId


def is_capped(config: Config) -> bool:
    """Whether a config limits the adapters of running requests. Source: vLLM 0.19.1 `LoRAConfig`;
    P9."""
    return config.max_loras > 0


def process_adapter_gate(step: Step, request: RequestState) -> Verdict | None:
    """Skip a request whose LoRA adapter would exceed `max_loras`, until a running request finishes.

    Source: vLLM 0.19.1 `schedule` ("Scheduling would exceed max_loras"); P9, P15.
    """
    adapter = request.request.adapter
    if adapter is None:
        return None
    names = step.state.rules[list_seated](step)
    in_use = [step.requests[name].request.adapter for name in names]
    has_one = has_lora_slot(adapter, in_use, step.state.config.max_loras)
    return None if has_one else Verdict.PASSED_OVER


def list_seated(step: Step) -> list[RequestId]:
    """Return the requests whose adapters occupy LoRA slots: the running ones. Source: P9."""
    return step.running


def has_lora_slot(adapter: str | None, in_use: Collection[str | None], max_loras: int) -> bool:
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


def is_every_running_adapter_in_a_slot(state: State) -> bool:
    """The running requests have at most `max_loras` adapters, if a config limits them. Source:
    P9."""
    adapters = {state.requests[name].request.adapter for name in state.running} - {None}
    return not is_capped(state.config) or len(adapters) <= state.config.max_loras


FEATURE: Final = Feature(
    "lora",
    is_capped,
    Hooks(gates=(process_adapter_gate,)),
    invariants=(is_every_running_adapter_in_a_slot,),
)
