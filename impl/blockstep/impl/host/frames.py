"""Frames: plans in flight whose rows were handled many at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockstep.spec.vocabulary import RequestId, TokenIds


@dataclass(slots=True, eq=False)
class Frame(Mapping[RequestId, TokenIds | None]):
    """A plan in flight: of each row the drafts that it carries, None where it does not sample."""

    slots: NDArray[np.int64]
    """[rows]"""
    births: NDArray[np.int64]
    """[rows]; who had the slot then."""
    names: NDArray[np.object_]
    """[rows]; request ids."""
    samples: NDArray[np.bool_] | None
    """[rows]; None: all of them do."""
    drafts: Mapping[int, TokenIds]
    """By row; only where there are some."""
    _rows: dict[RequestId, TokenIds | None] | None = None

    @property
    def rows(self) -> dict[RequestId, TokenIds | None]:
        """The same as a dict; built when first asked for."""
        if self._rows is None:
            names: list[RequestId] = self.names.tolist()
            rows: dict[RequestId, TokenIds | None] = dict.fromkeys(names, ())
            for row, drafts in self.drafts.items():
                rows[names[row]] = drafts
            if self.samples is not None:
                for row in (~self.samples).nonzero()[0].tolist():
                    rows[names[row]] = None
            self._rows = rows
        return self._rows

    def __getitem__(self, request_id: RequestId) -> TokenIds | None:
        return self.rows[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.slots)
