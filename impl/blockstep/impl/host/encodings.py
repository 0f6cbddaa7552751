"""Encodings: what the rows of a step need of the encoder, from choosing to telling the worker."""

from __future__ import annotations

from collections.abc import Iterable

from blockstep.impl.host.core import Core
from blockstep.impl.host.encoder import EncoderCache, Encoding
from blockstep.impl.host.step import Step
from blockstep.spec.vocabulary import EncoderInputs


class Encodings(Core):
    """Asks the encoder's cache what a row needs, and does it once the row is certain."""

    def _choose_if_any(
        self, slot: int, num_computed: int, num_scheduled: int, step: Step
    ) -> Encoding | None:
        """What a row needs, and how many tokens of it there is room for; None if it has no items.

        Changes nothing (P7).
        """
        request = self.table.requests[slot]
        if self.encoder is None or not request.items:
            return None
        return self.encoder.choose(request, num_computed, num_scheduled, step.encoder_budget)

    def _encode_if_any(self, slot: int, chosen: Encoding | None, step: Step) -> None:
        """The row is certain, and so is what it needs (P9)."""
        if self.encoder is None or chosen is None:
            return
        self.encoder.hold(self.table.requests[slot], chosen)
        step.encoder_budget -= chosen.num_embeds
        step.encodings[slot] = chosen

    def _give_way(self, slot: int) -> None:
        """A running request has no room for its next item: it holds none meanwhile.

        Two that hold the room of each other's next item would wait for ever (P10).
        """
        if self.encoder is not None:
            self.encoder.drop(self.table.requests[slot])

    def _undo_encoding(self, encoder: EncoderCache, victim: int, step: Step) -> None:
        """A row was taken back: nothing is encoded for it (P4, P22).

        What another row of the step has found is encoded for that one instead. What was evicted
        for it is there again.
        """
        request = self.table.requests[victim]
        encoder.drop(request)
        chosen = step.encodings.pop(victim, None)
        if chosen is None:
            return
        step.encoder_budget += chosen.num_embeds
        for index in chosen.inputs + chosen.external:
            name = encoder.name_of(request, index)
            if not encoder.is_held(name):
                encoder.withdraw(name)
            else:
                self._encode_for_another(name, index in chosen.inputs, step)
        encoder.bring_back()

    def _encode_for_another(self, name: str, is_input: bool, step: Step) -> None:
        """The first row that has found an item brings it in."""
        for slot, chosen in step.encodings.items():
            items = self.table.requests[slot].items
            index = next((i for i in chosen.found if items[i].identifier == name), None)
            if index is None:
                continue
            chosen.found.remove(index)
            if is_input:
                chosen.inputs = sorted([*chosen.inputs, index])
                chosen.num_embeds += items[index].num_embeds
                step.encoder_budget -= items[index].num_embeds
            else:
                chosen.external = sorted([*chosen.external, index])
            return

    def _release_items(self, encoder: EncoderCache, slots: Iterable[int]) -> None:
        """Rows have advanced: what is behind them they need no more."""
        for slot in slots:
            request = self.table.requests[slot]
            if request.items:
                encoder.release(request, self.table.num_computed[slot])

    def _list_inputs(self, step: Step, external: bool = False) -> tuple[EncoderInputs, ...]:
        """What is encoded, or loaded, for each row."""
        found = [
            (slot, chosen.external if external else chosen.inputs)
            for slot, chosen in step.encodings.items()
        ]
        requests = self.table.requests
        return tuple(
            EncoderInputs(requests[slot].request_id, tuple(items)) for slot, items in found if items
        )
