"""An encoder's worker: it drops, then fills, then reads; and random walks that it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from walks_support import GroupsWalk

from blockstep.spec import Config, Policy, Request, SpecMethod, State
from blockstep.spec import vocabulary as v

NAMES = ("cat", "dog", "owl", "bee")
METHODS = (SpecMethod.NONE, SpecMethod.NGRAM, SpecMethod.EAGLE, SpecMethod.EAGLE)


def list_read(config: Config, request: Request, start: int, end: int) -> Iterator[str]:
    """Identifiers of the items of which the tokens [start, end) of a request read."""
    for item in request.items:
        bits = item.is_embed or (True,) * item.length
        places = [item.offset + index for index, bit in enumerate(bits) if bit]
        if config.is_encoder_decoder:
            places = [0]
        ahead = int(config.spec_method is SpecMethod.EAGLE)
        if any(start <= place < end + ahead for place in places):
            yield item.identifier


class EncoderWorker:
    """What a worker has of encoded items, by the plans alone."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store: dict[str, int] = {}
        self.requests: dict[v.RequestId, Request] = {}
        self.num_made = self.num_shared = self.num_dropped = self.num_loaded = 0

    def execute(self, plan: v.Plan) -> None:
        config = self.config
        for name in plan.free_encoder_mm_hashes:
            assert self.store.pop(name, None) is not None, f"{name} is dropped, and is not there"
        self.num_dropped += len(plan.free_encoder_mm_hashes)
        self.requests |= {row.request_id: row.request for row in plan.new}
        made = sum(self.fill(inputs) for inputs in plan.scheduled_encoder_inputs)
        self.num_loaded += sum(self.fill(inputs) for inputs in plan.external_encoder_inputs)
        assert made <= config.encoder_compute_budget, "P9"
        self.num_made += made
        assert sum(self.store.values()) <= config.encoder_cache_size, "P9"
        planned = {
            self.requests[inputs.request_id].items[index].identifier
            for inputs in (*plan.scheduled_encoder_inputs, *plan.external_encoder_inputs)
            for index in inputs.item_indices
        }
        for row in plan.rows:
            request = self.requests[row.request_id]
            start = row.num_computed_tokens
            end = start + row.num_scheduled_tokens
            for name in list_read(config, request, start, end):
                assert name in self.store, f"{row.request_id} reads of {name}, which is not there"
                self.num_shared += name not in planned

    def fill(self, inputs: v.EncoderInputs) -> int:
        """Make or load items; embeddings of them."""
        items = self.requests[inputs.request_id].items
        assert list(inputs.item_indices) == sorted(set(inputs.item_indices))
        for index in inputs.item_indices:
            item = items[index]
            self.store[item.identifier] = item.num_embeds
        return sum(items[index].num_embeds for index in inputs.item_indices)


def draw_config(random: Random) -> Config:
    """One whose encoder is short of everything; beside the decoder in one of five."""
    method, depth = random.choice(METHODS), random.choice((1, 1, 2, 3))
    is_beside = random.random() < 0.2
    groups: tuple[v.KVGroup, ...] = ()
    if is_beside:
        groups = (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.CROSS_ATTENTION, 4))
    elif random.random() < 0.2:
        groups = (v.KVGroup(v.GroupKind.FULL, 2), v.KVGroup(v.GroupKind.SLIDING_WINDOW, 2, 3))
    return Config(
        num_blocks=random.randint(8, 30),
        block_size=2,
        max_num_seqs=random.randint(2, 4),
        max_num_batched_tokens=24 if is_beside else random.randint(1, 10),
        max_model_len=24,
        policy=random.choice((Policy.FCFS, Policy.PRIORITY, Policy.PRIORITY)),
        enable_prefix_caching=not is_beside and random.random() < 0.8,
        enable_chunked_prefill=not is_beside,
        long_prefill_token_threshold=0 if is_beside else random.choice((0, 0, 2, 5)),
        scheduler_reserve_full_isl=random.random() < 0.4,
        spec_method=method,
        num_speculative_tokens=0 if method is SpecMethod.NONE else random.randint(1, 3),
        max_frames_in_flight=depth,
        async_scheduling=depth > 1 and random.random() < 0.7,
        groups=groups,
        encoder_compute_budget=random.randint(1, 6),
        encoder_cache_size=random.randint(1, 7),
        disable_chunked_mm_input=is_beside or random.random() < 0.3,
        is_encoder_decoder=is_beside,
    )


def draw_mask(name: str, length: int) -> tuple[bool, ...]:
    """The same for each place of an item of this name and length."""
    random = Random(f"{name}/{length}")
    mask = tuple(random.random() < 0.6 for _ in range(length))
    return mask if random.random() < 0.5 and any(mask) else ()


def draw_items(random: Random, config: Config, num_prompt: int) -> tuple[v.MultiModalItem, ...]:
    """Items one behind the other, some with text between, of lengths that follow from a name."""
    items, start = [], random.choice((0, 0, 1, 2))
    if config.is_encoder_decoder:
        start, num_prompt = 0, 9
    while start < num_prompt:
        name = random.choice(NAMES)
        length = 1 + NAMES.index(name)
        if start + length > num_prompt:
            break
        if config.is_encoder_decoder:
            return (v.MultiModalItem(name, 0, length),)
        items.append(v.MultiModalItem(name, start, length, draw_mask(name, length)))
        start += length + random.choice((0, 0, 1, 3))
    return tuple(items)


class EncoderWalk(GroupsWalk):
    """A run of drawn events with items, offers and resets, each plan carried out as it is made."""

    def __init__(self, seed: int, config: Config | None = None) -> None:
        random = Random(seed)
        super().__init__(random, config or draw_config(random))
        self.worker = EncoderWorker(self.oracle.state.config)

    def draw_request(self, number: int) -> Request:
        random, prompt = self.random, self.draw_prompt()
        items = draw_items(random, self.oracle.state.config, len(prompt))
        return Request(
            f"r{number}", prompt, random.randint(1, 6), priority=random.randint(0, 2), items=items
        )

    def submit(self, number: int) -> Request | None:
        request = self.draw_request(number)
        if v.item_problem(self.oracle.state.config, request) is not None:
            return None
        return super().submit_if_servable(request)

    def check_plan(self, before: State, plan: v.Plan) -> None:
        self.worker.execute(plan)
        encoder = self.oracle.state.encoder
        if encoder.is_shared:
            kept = {name: entry.num_embeds for name, entry in encoder.entries.items()}
            assert self.worker.store == kept
        else:
            assert set(self.worker.store) == set(encoder.freed)
        if self.random.random() < 0.05:
            self.oracle.reset_encoder()
            self.worker.store.clear()
        if self.random.random() < 0.1:
            self.oracle.offer(*self.random.sample(NAMES, self.random.randint(0, 2)))

    def drain(self) -> None:
        super().drain()
        encoder = self.oracle.state.encoder
        assert set(encoder.freeable) == set(encoder.entries)
