"""Encodings: the encoder outputs that the rows of a step need, from the choice to the plan."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.impl.encoder import EncoderCache, Encoding
from blockstep.impl.host.core import Core
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import EncoderInputs


class Encodings(Core):
    """Chooses the encoder outputs of a row, and holds them once the row has its blocks."""

    def _choose_if_any(
        self, slot: int, num_computed: int, num_scheduled: int, step: Step
    ) -> Encoding | None:
        """Return what a row needs of the encoder, and how many tokens fit; None if it has no items.

        This changes nothing (P7).
        """
        request = self.table.requests[slot]
        if self.encoder is None or not request.items:
            return None
        return self.encoder.choose(request, num_computed, num_scheduled, step.encoder_budget)

    def _encode_if_any(self, slot: int, chosen: Encoding | None, step: Step) -> None:
        """Hold the chosen encoder outputs, once the row has its blocks (P9)."""
        if self.encoder is None or chosen is None:
            return
        self.encoder.hold(self.table.requests[slot], chosen)
        step.encoder_budget -= chosen.num_embeds
        step.encodings[slot] = chosen

    def _give_way(self, slot: int) -> None:
        """Release all items of a running request whose next item does not fit.

        Else two requests that hold the space of each other's next item would wait for ever (P10).
        """
        if self.encoder is not None:
            self.encoder.drop(self.table.requests[slot])

    def _undo_encoding(self, encoder: EncoderCache, victim: int, step: Step) -> None:
        """Undo the encoding of a row that was removed from the step (P4, P22)."""
        step.encoder_budget += encoder.undo(victim, step.encodings, self.table.requests)

    def _release_items(self, encoder: EncoderCache, slots: Iterable[int]) -> None:
        """Release the items whose tokens are computed, after rows have advanced."""
        for slot in slots:
            request = self.table.requests[slot]
            if request.items:
                encoder.release(request, self.table.num_computed[slot])

    def _list_inputs(self, step: Step, external: bool = False) -> tuple[EncoderInputs, ...]:
        """Return the items that are encoded, or loaded, for each row."""
        found = [
            (slot, chosen.external if external else chosen.inputs)
            for slot, chosen in step.encodings.items()
        ]
        requests = self.table.requests
        return tuple(
            EncoderInputs(requests[slot].request_id, tuple(items)) for slot, items in found if items
        )
