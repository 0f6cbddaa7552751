"""Our engine, held to weaker equivalences than it could be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockstep.conformance.engine import EngineTraits, Renamed, Safety, SamePlans
from blockstep.impl.compiled import CompiledEngine
from blockstep.impl.host import HostEngine
from blockstep.impl.host.step import Step
from blockstep.spec import vocabulary as v


class AtSafety(CompiledEngine):
    """Judged by properties alone."""

    traits = EngineTraits(equivalence=Safety())


class AtRenamed(CompiledEngine):
    """Compared up to the ids of blocks."""

    traits = EngineTraits(equivalence=Renamed())


class AtPlan(CompiledEngine):
    """Compared by its plans."""

    traits = EngineTraits(equivalence=SamePlans(shows_blocks=True))


class WaitsError(Exception):
    """A request that runs alone waits for its tokens in flight."""


class DropsInFlight(HostEngine):
    """It drops what frames in flight sample for a request that it preempts, and runs it again.

    A request that runs alone is not preempted before its tokens are known: it would drop them each
    time that it comes to the end of the pool, for ever.
    """

    traits = EngineTraits(equivalence=Safety(), drops_tokens_in_flight=True)

    def _make_room(self, slot: int, needed: int, position: int, step: Step) -> int:
        try:
            return super()._make_room(slot, needed, position, step)
        except WaitsError:
            return -1

    def _select_victim(self) -> int:
        if len(self.running) == 1 and self._awaits_tokens(self.running[0]):
            raise WaitsError
        return super()._select_victim()

    def _preempt(self, slot: int) -> None:
        super()._preempt(slot)
        self._drop_rows_behind(slot)
        self.table.num_output_placeholders[slot] = 0


class DropsAndDoesNotSaySo(DropsInFlight):
    """It keeps the tokens of no preempted request, and its traits do not say so."""

    traits = EngineTraits(equivalence=Safety())


class SaysSoAndDoesNotDrop(CompiledEngine):
    """It delivers the tokens of preempted requests, and its traits say that it drops them."""

    traits = DropsInFlight.traits


class DropsForGood(DropsInFlight):
    """A defect: a dropped token is never delivered, and its position does not run again: the
    request goes on behind it."""

    def _deliver_rows(
        self,
        frame: Mapping[v.RequestId, v.TokenIds | None],
        answers: Mapping[v.RequestId, v.TokenIds],
        *args: Any,
    ) -> list[v.OutputRow]:
        frame_id = next(iter(self.frames))
        for name in self.dropped.get(frame_id, {}):
            slot = self.table.slot_of.get(name)
            if slot is not None and answers[name]:
                self._accept(slot, answers[name][:1])
        return super()._deliver_rows(frame, answers, *args)

    def _awaits_tokens(self, slot: int) -> bool:
        name = self.table.requests[slot].request_id
        return any(name in rows for rows in self.dropped.values())
