"""Grammars: small automata, whose outputs are short, loop, or may never end; and bitmasks."""

from __future__ import annotations

from dataclasses import replace

from blockstep.conformance.draw.client_view import Draw, list_ending, list_frames
from blockstep.conformance.draw.feature import LATE_ONE_IN, Draws, Late, Situation
from blockstep.conformance.draw.presets import PROPOSERS, Swarm
from blockstep.conformance.draw.view import View, WeightedAction
from blockstep.conformance.features.groups import KINDS
from blockstep.conformance.features.masks import FEATURE
from blockstep.conformance.protocol.feature import settle_states
from blockstep.conformance.protocol.feature_selection import FeatureSelection
from blockstep.conformance.protocol.features import DRAFTS, GRAMMAR, HOSTILE
from blockstep.conformance.protocol.program import Action, Hostile, Mask
from blockstep.spec import vocabulary as v

FEW_TOKENS = 5


def add_to_config(late: Late) -> None:
    """Draw a token that ends reasoning, and drafts, which grammars may cut."""
    draw, wish = late.draw, late.wish
    late.drawn |= {GRAMMAR.name, DRAFTS.name} - wish.never
    late.config = draw_reasoning(late.config, draw, late.swarm.vocabulary_size)
    reasons = late.config.reasoning_end_token_id is not None
    is_drawn = draw.chance(60) or reasons  # one commit then brings the end, and more
    if wish.decide(DRAFTS, is_drawn) and not late.config.num_speculative_tokens:
        late.config = _add_drafts(late.config, draw, keeps_states=KINDS.name in wish.always)


def one_in(wish: FeatureSelection) -> int:
    """Return the number of runs of which one has masks: two if all have grammars."""
    return 2 if GRAMMAR.name in wish.always else LATE_ONE_IN


def goes_with(late: Late) -> bool:
    """Return whether runs may have grammars."""
    return GRAMMAR.name not in late.wish.never


def _add_drafts(config: v.Config, draw: Draw, keeps_states: bool) -> v.Config:
    """Return the config with drafts, or unchanged if drafts would remove all of its groups.

    Recurrent groups without blocks for drafts are removed. If the config `keeps_states`, it is
    returned unchanged instead.
    """
    method, count = draw.choice(PROPOSERS), draw.integer(1, 4)
    added = settle_states(replace(config, spec_method=method, num_speculative_tokens=count))
    if keeps_states and len(added.groups) < len(config.groups):
        return config
    return added if bool(added.groups) is bool(config.groups) else config


def draw_reasoning(config: v.Config, draw: Draw, vocabulary_size: int) -> v.Config:
    """Return the config, sometimes with a token that ends reasoning; grammars may wait for it."""
    if not draw.chance(45 if vocabulary_size <= FEW_TOKENS else 15):
        return config  # with many tokens it is hardly ever sampled
    return replace(
        config,
        reasoning_end_token_id=draw.integer(0, vocabulary_size - 1),
        enable_in_reasoning=draw.chance(25),
    )


def add_to_request(swarm: Swarm, draw: Draw, request: v.Request, goes_on: bool) -> v.Request:
    """Return the request, most often with a grammar, which may wait for the end of reasoning."""
    if not (swarm.has(GRAMMAR) and draw.chance(60)):
        return request
    grammar = draw_grammar(draw, swarm.vocabulary_size)
    request = replace(request, structured_output=True, grammar=grammar)
    end = swarm.config.reasoning_end_token_id
    if end is not None and not goes_on and draw.chance(70):  # or most prompts would contain it
        other = (end + 1) % swarm.vocabulary_size
        without = (other if token == end else token for token in request.prompt_token_ids)
        request = replace(request, prompt_token_ids=tuple(without))
    return request


def draw_grammar(draw: Draw, vocabulary_size: int) -> v.Grammar:
    """Draw two to five states; each leads to another one, most often the next, or terminates.

    Half of the grammars lead back from the last state, so that outputs are long. Few tokens are
    allowed, so most wrong drafts are forbidden; sometimes all are allowed.
    """
    num_states, is_loop = draw.integer(2, 5), draw.chance(50)
    states: list[tuple[tuple[int, int], ...]] = []
    for state in range(num_states):
        if state == num_states - 1 and not is_loop:
            states.append(())  # terminated
            continue
        most = vocabulary_size if draw.chance(15) else min(3, vocabulary_size)
        tokens = {
            draw.integer(0, vocabulary_size - 1) for _ in range(draw.integer(1, min(most, 8)))
        }
        edges = []
        for token in sorted(tokens):
            following = (state + 1) % num_states
            if draw.chance(20):
                following = draw.integer(0, num_states - 1)
            edges.append((token, following))
        states.append(tuple(edges))
    return v.Grammar(tuple(states))


def grammar_failed(view: View, draw: Draw) -> Action:
    """Report a grammar as failed, most often of a structured request; sometimes of any other id."""
    live = view.client.live
    structured = [name for name, request in live.items() if request.structured_output]
    plans, delivered = view.client.plans, view.client.delivered
    ending = [name for plan in plans for name in list_ending(plan, live, delivered)]
    if ending and draw.chance(30):
        return v.GrammarFailed(draw.choice(ending))
    if structured and draw.chance(85):
        return v.GrammarFailed(draw.choice(structured))
    return v.GrammarFailed(draw.choice([*live, *view.client.ended[-2:], "nobody"]))


def mask(view: View, draw: Draw) -> Action:
    """Ask for a bitmask, most often of the newest plan; sometimes with a malformed event."""
    if view.swarm.has(HOSTILE) and draw.chance(25):
        rows = tuple(
            v.RowTokens(draw.choice([*view.client.live, "nobody"]), (0,) * draw.integer(0, 2))
            for _ in range(draw.integer(0, 2))
        )
        return Hostile(v.GrammarBitmask(draw.choice(list_frames(view.client)), rows))
    return Mask(draw.integer(0, max(len(view.client.plans) - 1, 0)))


def _has_plans(view: View) -> bool:
    return bool(view.client.plans)


def list_mistakes(situation: Situation) -> list[v.Event]:
    """Return requests with impossible grammars, and malformed questions for a bitmask."""
    names, frames = situation.names, situation.frames
    if not situation.swarm.has(GRAMMAR):
        return []
    nowhere = v.Grammar((((0, 7),),))
    twice = (v.RowTokens(names[0], (0,)),) * 2
    return [
        v.Submit(v.Request("bad", (0,), grammar=nowhere)),
        v.Submit(v.Request("bad", (0,), structured_output=True, grammar=nowhere)),
        v.Submit(v.Request("bad", (0,), structured_output=True, grammar=v.Grammar(()))),
        v.GrammarFailed("nobody"),
        v.GrammarBitmask(-1),
        *[v.GrammarBitmask(frame) for frame in frames[-3:]],
        v.GrammarBitmask(frames[0], twice),
    ]


DRAWS = Draws(
    add_to_config=add_to_config,
    one_in=one_in,
    goes_with=goes_with,
    add_to_request=add_to_request,
    actions={
        "grammar_failed": WeightedAction(grammar_failed, 2, FEATURE),
        "mask": WeightedAction(mask, 8, FEATURE, None, _has_plans),
    },
    list_mistakes=list_mistakes,
)
