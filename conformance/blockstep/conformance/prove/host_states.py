"""The engine's functions in the states of `harness`.

The engine is loaded by name. Its functions run here as the Python that they are, on lists instead
of arrays, so that numbers in them can be symbolic. A law runs one of them and the specification's
function on the same counters, and asserts equal results. Functions that make arrays have no laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from blockstep.conformance.prove.harness import build_config
from blockstep.spec.core.requests import RequestState
from blockstep.spec.vocabulary import Config, Policy, Status

_PACKAGE = "blockstep.impl.host"
COLUMNS: Any = import_module(f"{_PACKAGE}.state")


@cache
def _load(name: str) -> dict[str, Any]:
    """Return the names of a module, with its functions and those that it imports as Python, alone
    or by their module."""
    space = dict(vars(import_module(name)))
    for key, value in space.items():
        if isinstance(value, ModuleType) and value.__name__.startswith(_PACKAGE):
            space[key] = SimpleNamespace(**_load(value.__name__))
            continue
        function = getattr(getattr(value, "inner", value), "py_func", value)
        if not isinstance(function, FunctionType) or not function.__module__.startswith(_PACKAGE):
            continue
        if function.__module__ == name:
            space[key] = FunctionType(function.__code__, space, function.__name__)
        else:
            space[key] = _load(function.__module__)[function.__name__]
    return space


def _load_functions(module: str) -> Any:
    return SimpleNamespace(**_load(f"{_PACKAGE}.{module}"))


BLOCKS = _load_functions("blocks")
ENGINE = _load_functions("engine")
GROUPS = _load_functions("groups")
PLANNING = _load_functions("planning")
RESULTS = _load_functions("results")


@dataclass(slots=True)
class Rows:
    """Numbers with one index or more, as in an array; any of them may be symbolic."""

    values: list[Any]

    def __getitem__(self, at: tuple[int, ...]) -> Any:
        """Return the number at these indices."""
        value: Any = self.values
        for index in at:
            value = value[index]
        return value

    def __setitem__(self, at: tuple[int, ...], number: Any) -> None:
        """Set the number at these indices."""
        row: Any = self.values
        for index in at[:-1]:
            row = row[index]
        row[at[-1]] = number

    def tolist(self) -> list[Any]:
        """Return the numbers as nested lists."""
        return self.values


def build_host(config: Config, *requests: RequestState) -> Any:
    """Return the engine's state with these requests at indices 0, 1 and so on, in the same batch
    rows, and with a budget as large as the config's.
    """
    c = COLUMNS
    made = c.make_state(build_config())
    lists = {name: array.tolist() for name, array in zip(made._fields, made, strict=True)}
    scalars = lists.pop("scalars")
    scalars[c.BLOCK_SIZE], scalars[c.MAX_MODEL_LEN] = config.block_size, config.max_model_len
    scalars[c.MAX_TOKENS_PER_ROW] = config.long_prefill_token_threshold or config.max_model_len
    scalars[c.NUM_LOOKAHEAD] = config.num_lookahead_tokens
    scalars[c.IS_ASYNC] = config.async_scheduling
    scalars[c.IS_PRIORITY] = config.policy is Policy.PRIORITY
    scalars[c.HAS_CACHE] = config.enable_prefix_caching
    scalars[c.BUDGET], scalars[c.NUM_RUNNING] = config.max_num_batched_tokens, len(requests)
    state = SimpleNamespace(scalars=scalars, **{name: Rows(rows) for name, rows in lists.items()})
    state.groups[0, c.SIZE] = config.block_size
    for slot, request in enumerate(requests):
        state.lines[slot, c.RUNNING] = slot
        _fill(state, slot, request, config)
    return state


def _fill(state: Any, slot: int, request: RequestState, config: Config) -> None:
    c, asked, row = COLUMNS, request.request, state.requests.values[slot]
    num_prompt = len(asked.prompt_token_ids)
    row[c.STATUS] = c.IS_RUNNING if request.status is Status.RUNNING else c.IS_WAITING
    row[c.BATCH_ROW] = row[c.LABEL] = slot
    row[c.NUM_PROMPT] = num_prompt
    row[c.NUM_KNOWN], row[c.NUM_COMPUTED] = request.num_known_tokens, request.num_computed_tokens
    row[c.NUM_PROMISED] = request.num_output_placeholders
    row[c.NUM_DRAFTS] = len(request.spec_token_ids)
    row[c.IS_PREFILL] = request.is_prefill_chunk
    row[c.PRIORITY], row[c.ARRIVAL] = asked.priority, asked.arrival_time
    row[c.END_BY_MAX_TOKENS] = num_prompt + asked.max_tokens
    row[c.MAX_KNOWN] = min(num_prompt + asked.max_tokens, config.max_model_len)
    row[c.MIN_TOKENS], row[c.NUM_STOPS] = asked.min_tokens, len(asked.stop_token_ids)
    row[c.HAS_STOPS] = bool(asked.stop_token_ids) or asked.eos_token_id is not None
    row[c.EOS] = c.NONE if asked.eos_token_id is None else asked.eos_token_id
    row[c.STOPS :] = [*asked.stop_token_ids]
    (held,) = request.holdings
    state.holdings[slot, 0, c.HELD] = len(held.block_table)
    state.holdings[slot, 0, c.PUBLISHED] = held.num_cached_blocks
    for index, block in enumerate(held.block_table):
        state.block_tables[0, slot, index] = block
