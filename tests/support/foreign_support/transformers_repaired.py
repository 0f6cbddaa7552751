"""The continuous batching of transformers with the four defects that are known worked around."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus

from blockstep.conformance.engines.adapters import transformers_cb
from blockstep.spec import vocabulary as v


class _Repaired(transformers_cb.Synchronous):
    def _build(self) -> Any:
        processor = super()._build()
        scheduler = processor.scheduler
        schedule, clear = scheduler.schedule_batch, scheduler.clear_cancelled_requests

        def schedule_batch(*budgets: int) -> Any:
            """A full pool is no error while the batch in flight may end a request."""
            batch, *rest = schedule(*budgets)
            return [] if batch is None and any(self.frames.values()) else batch, *rest

        def clear_cancelled_requests() -> Any:
            """Forget late cancels, give up canceled work in flight, and admit requests again."""
            scheduler._requests_to_cancel &= set(self.ending)
            states = clear()
            for state in states:
                state.status = RequestStatus.FINISHED
            scheduler.block_new_requests &= not states
            return states

        scheduler.schedule_batch = schedule_batch
        scheduler.clear_cancelled_requests = clear_cancelled_requests
        return processor

    def _deliver(self, state: Any) -> v.OutputRow:
        row = super()._deliver(state)
        if row.finish_reason is not None and row.request_id in self.ending:
            self.ending.remove(row.request_id)
        return row


class Synchronous(_Repaired):
    """Each batch is updated before the next one is prepared."""


class Asynchronous(_Repaired, transformers_cb.Asynchronous):
    """A batch is prepared while the one before is in flight."""
