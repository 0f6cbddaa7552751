"""Adapters: quirks of releases with LoRA slots."""

from __future__ import annotations

from blockstep.spec.core.rules import Rules
from blockstep.spec.core.work import Step
from blockstep.spec.features import lora
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.vocabulary import Config, RequestId


def lora_slots_of_rows_only(rules: Rules, _config: Config) -> Rules:
    """A running request without a row in the step leaves its LoRA slot to others."""
    return rules.replacing(lora.list_seated, list_seated)


def list_seated(step: Step) -> list[RequestId]:
    """Modified `lora.list_seated`: the requests with a row in the step."""
    return [row.request_id for row in step.rows]


STORIES = (
    QuirkStory(
        Quirk.LORA_SLOTS_OF_ROWS_ONLY,
        lora_slots_of_rows_only,
        "a running request without a row in the step leaves its LoRA slot to others",
        ("P9",),
        "not found upstream (fixed in 0.33.0)",
        "0.11.0 0.19.1",
        "two frames, not asynchronous, max_loras 1; one request with an adapter is in flight and "
        "one with another adapter is submitted: it is admitted, and a later step has rows of both,"
        " where upstream stops with an assertion",
    ),
)
