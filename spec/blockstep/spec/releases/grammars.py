"""Grammars: quirks of releases with bitmasks, and with the end of reasoning."""

from __future__ import annotations

from dataclasses import replace

from blockstep.spec.beside.grammar import Stand, holds
from blockstep.spec.releases.quirk import Quirk, QuirkStory
from blockstep.spec.requests import Frame, RequestState
from blockstep.spec.rules import Rules
from blockstep.spec.vocabulary import Config, Grammar, TokenId, TokenIds


def padding_unmasks_what_follows(rules: Rules, _config: Config) -> Rules:
    """Positions after a draft that the grammar forbids have a full mask."""
    return replace(rules, masks_behind_placeholders=False)


def mask_of_who_samples_by_now(rules: Rules, _config: Config) -> Rules:
    """A bitmask has the rows that sample when it is made, not those of its frame's plan."""

    def has_mask_row(has_mask: bool, frame: Frame, request: RequestState) -> bool:
        del has_mask
        is_held = request.request.grammar is not None and not request.is_prefill_chunk
        return frame.has_structured_output and is_held

    return replace(rules, has_mask_row=has_mask_row)


def reasoning_ends_with_its_step(rules: Rules, _config: Config) -> Rules:
    """The grammar does not apply to the rest of the step in which reasoning ends.

    Nor do these tokens advance the grammar.
    """

    def get_next_stand(
        config: Config, grammar: Grammar, stand: Stand, token: TokenId
    ) -> Stand | None:
        if not holds(config, stand):
            return stand
        return rules.get_next_stand(config, grammar, stand, token)

    def get_settled(
        request: RequestState, before: Stand, config: Config, tokens: TokenIds
    ) -> RequestState:
        del before
        if holds(config, request.stand) or config.reasoning_end_token_id not in tokens:
            return request
        return replace(request, stand=Stand(request.stand.state, reasoning_ended=True))

    return replace(rules, get_next_stand=get_next_stand, get_settled=get_settled)


def reasoning_ends_at_the_last_token(rules: Rules, _config: Config) -> Rules:
    """The end of reasoning is seen only as the last token of a step."""

    def get_settled(
        request: RequestState, before: Stand, config: Config, tokens: TokenIds
    ) -> RequestState:
        del tokens
        text = request.all_token_ids
        first = request.num_computed_tokens - request.num_output_placeholders
        seen = text[first if first >= 0 else max(len(text) + first, 0) :]
        after = rules.get_settled(request, before, config, seen)
        is_seen = holds(config, before) or config.reasoning_end_token_id in seen
        return after if is_seen else replace(after, stand=before)

    return replace(rules, get_settled=get_settled)


def reasoning_is_sought_in_the_next_chunk(rules: Rules, _config: Config) -> Rules:
    """The end of reasoning is searched for in the next input of a session, not in its outputs.

    This is at a stop that the session continues from: its text is searched as it is by then. The
    last sampled token is gone, and the next input follows:

        computed        |------ prompt ------|-- kept --|
        searched                                        |-- next input --|
        should be                                   |--- sampled ---|
    """

    def get_settled(
        request: RequestState, before: Stand, config: Config, tokens: TokenIds
    ) -> RequestState:
        chunk = request.updates[0] if request.updates else None
        if not tokens or holds(config, before) or chunk is None or not chunk.resumable:
            return rules.get_settled(request, before, config, tokens)
        reason, _ = rules.compute_stop(
            request, request.output_token_ids, request.num_known_tokens, config.max_model_len
        )
        if reason is None:
            return rules.get_settled(request, before, config, tokens)
        text = request.all_token_ids[: rules.get_num_kept(request)] + chunk.prompt_token_ids
        first = request.num_computed_tokens - request.num_output_placeholders
        seen = text[first if first >= 0 else max(len(text) + first, 0) :]
        return replace(request, stand=Stand(before.state, config.reasoning_end_token_id in seen))

    return replace(rules, get_settled=get_settled)


STORIES = (
    QuirkStory(
        Quirk.PADDING_UNMASKS_WHAT_FOLLOWS,
        padding_unmasks_what_follows,
        "positions after a draft that the grammar forbids have a full mask",
        ("P24",),
        "not found upstream",
        "0.19.1",
        "asynchronous, two drafts, a grammar that forbids the first of them: the mask of the first"
        " position follows the grammar, and those of the next two allow every token",
    ),
    QuirkStory(
        Quirk.MASK_OF_WHO_SAMPLES_BY_NOW,
        mask_of_who_samples_by_now,
        "a bitmask has the rows that sample when it is made, not those of its frame's plan",
        (),
        "not found upstream",
        "0.19.1",
        "two frames, two requests with grammars, the prompt of one in two chunks: once the second "
        "chunk is planned, the bitmask of the first frame has a row of that request",
    ),
    QuirkStory(
        Quirk.REASONING_ENDS_WITH_ITS_STEP,
        reasoning_ends_with_its_step,
        "the grammar does not apply to the rest of the step in which reasoning ends",
        ("P23", "P24"),
        "#44006",
        "0.19.1",
        "a grammar that waits for the end of reasoning; the drafts are the end of reasoning and a "
        "token that the grammar forbids: both are taken, scheduled, and may be accepted",
    ),
    QuirkStory(
        Quirk.REASONING_ENDS_AT_THE_LAST_TOKEN,
        reasoning_ends_at_the_last_token,
        "the end of reasoning is seen only as the last token of a step",
        ("P23",),
        "#43388",
        "0.19.1",
        "a grammar that waits for the end of reasoning; a step samples the end of reasoning, a "
        "draft, and one token more: the grammar never applies",
    ),
    QuirkStory(
        Quirk.REASONING_IS_SOUGHT_IN_THE_NEXT_CHUNK,
        reasoning_is_sought_in_the_next_chunk,
        "the end of reasoning is searched for in the next input of a session, not in its outputs",
        ("P23",),
        "not found upstream",
        "0.19.1",
        "a grammar that waits for the end of reasoning; a session samples the end of reasoning as "
        "the only token of an input, and the next input is queued: its grammar does not apply to "
        "that",
        upon=(Quirk.SESSIONS_KEEP_THEIR_GRAMMAR,),
    ),
)
