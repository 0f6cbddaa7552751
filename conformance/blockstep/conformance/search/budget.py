"""Budget: parses the length of a search, in time or in events."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "h": 3600}


def read_budget(text: str) -> tuple[int | None, float | None]:
    """Return (events, seconds), one of them None, of `60s`, `5m`, `200000` or `200000events`.

    Raises:
        ValueError: if it is neither.
    """
    match = re.fullmatch(r"\s*([\d_,]+(?:\.\d+)?)\s*(s|m|h|events?|)\s*", text)
    number = float(match[1].replace("_", "").replace(",", "")) if match else 0.0
    if match is None or number <= 0:
        raise ValueError(
            f"budget {text!r}: must be a time (60s, 5m) or a number of events (200000)"
        )
    unit = match[2]
    return (None, number * SECONDS[unit]) if unit in SECONDS else (int(number), None)
