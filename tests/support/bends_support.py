"""Bends for tables of cases: each function takes the fields to change and returns a bend."""

from dataclasses import replace
from typing import Any

from play_support.play import Bend, after, changed, first_output, observed, with_row


def in_request(name: str, **fields: Any) -> Bend:
    return lambda step: changed(step, name, **fields)


def in_row(name: str, **fields: Any) -> Bend:
    return lambda step: with_row(step, name, **fields)


def in_output(**fields: Any) -> Bend:
    return lambda step: first_output(step, **fields)


def in_state(**fields: Any) -> Bend:
    return lambda step: after(step, **fields)


def in_answer(**fields: Any) -> Bend:
    return lambda step: observed(step, **fields)


def in_step(**fields: Any) -> Bend:
    return lambda step: replace(step, **fields)
