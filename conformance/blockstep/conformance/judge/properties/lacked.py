"""Lacked: states and answers show no feature that the config switches off (P18)."""

from __future__ import annotations

from blockstep.conformance.features.events.properties import told_by
from blockstep.conformance.judge.properties.ledger import WHOLE, Ledger
from blockstep.conformance.judge.properties.sentence import Complaints, differing, sentence
from blockstep.conformance.judge.properties.step import Step
from blockstep.conformance.protocol.features import PARTS
from blockstep.spec import vocabulary as v


@sentence("P18", *v.EVENT_TYPES, needs=WHOLE)
def nothing_is_known_of_what_the_config_lacks(step: Step, ledger: Ledger) -> Complaints:
    """A state shows no encoder, no store, no kept blocks and no closed admission, a plan no load,
    and an answer no KV event, unless the config asks for them."""
    after, seen, lacked = step.after, step.observation, ledger.lacked
    for name, part in (
        ("encoder_cache_size", after.encoder),
        ("kv_connector", after.transfers),
        *[(it.setting, getattr(after, it.name)) for it in PARTS],
    ):
        if (part is None) is not (name in lacked):
            yield from differing(name, name not in lacked, part is not None)
    if after.admission_closed and "admission_high_blocks" in lacked:
        yield from differing("admission_closed", False, True)
    if isinstance(seen, v.Plan):
        if seen.kv_loads and "kv_connector" in lacked:
            yield from differing("kv_loads", (), seen.kv_loads)
    elif "enable_kv_cache_events" in lacked:
        yield from differing("kv_events", (), told_by(step))
