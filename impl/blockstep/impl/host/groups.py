"""Groups: the blocks of a request in each of several KV groups, and its hits in all groups.

There is one block table per group, and one pool for all. A table has null blocks where no later
token reads; a group of larger blocks names each by the node of its last tokens:

    nodes              a     b     c     d    | tail
    blocks of 2        7     3     9     4
    blocks of 4           5           8          5 carries b, 8 carries d
"""

from __future__ import annotations

from blockstep.impl.host import blocks as b
from blockstep.impl.host import state as c
from blockstep.impl.host.jit import compiled, entry
from blockstep.impl.host.state import State
from blockstep.spec.vocabulary import NULL_BLOCK

# Blocks of a running request


@compiled
def find_first_read(s: State, group: int, computed: int) -> int:
    """Return the first block with a token that is read by tokens after the `computed` ones."""
    kind, read = s.groups[group, c.KIND], computed
    if kind <= c.IS_CROSS:
        return 0
    if kind == c.IS_WINDOW:
        read = min(computed, s.groups[group, c.SPAN] - 1)
    elif kind == c.IS_CHUNKED:
        read = computed % s.groups[group, c.SPAN]
    else:
        read = min(computed, 1)
    return int((computed - read) // s.groups[group, c.SIZE])


@compiled
def leave_blocks(s: State, slot: int) -> None:
    """Free the blocks of a request that no later token reads, last block first.

    Its drafts in flight may all be rejected; then the next step starts before them (P1, P14). A
    state has a spare block for each draft.
    """
    for group in range(s.scalars[c.NUM_GROUPS]):
        if s.groups[group, c.KIND] <= c.IS_CROSS:
            continue
        in_doubt = s.requests[slot, c.NUM_IN_DOUBT]
        if s.groups[group, c.KIND] >= c.IS_STATE:
            in_doubt = max(in_doubt, s.groups[group, c.SPARE])
        end = find_first_read(s, group, max(s.requests[slot, c.NUM_COMPUTED] - in_doubt, 0))
        begin = s.holdings[slot, group, c.LEFT]
        if end > begin:
            batch_row = s.requests[slot, c.BATCH_ROW]
            if b.is_fenced(s, slot):
                b.defer_range(s, slot, group, begin, end, True)
            else:
                b.free_range(s, group, batch_row, begin, end)
            for index in range(begin, end):
                s.block_tables[group, batch_row, index] = NULL_BLOCK
            s.holdings[slot, group, c.LEFT] = end


@compiled
def count_blocks(s: State, group: int, slots: int) -> int:
    """Return the length of a table with `slots` slots."""
    size = s.groups[group, c.SIZE]
    return int((slots + size - 1) // size + s.groups[group, c.SPARE])


@compiled
def count_missing(
    s: State, group: int, held: int, has_spare: int, tokens: int, slots: int, loaded: int
) -> int:
    """Return the blocks to take for a table of `held` blocks (P8).

    Args:
        s: the state.
        group: the group.
        held: length of the table.
        has_spare: whether it has a state with spare blocks.
        tokens: tokens that are computed after the step.
        slots: the same with the lookahead.
        loaded: tokens up to which a store loads; 0 if it loads nothing.
    """
    if s.groups[group, c.KIND] != c.IS_ALIGNED:
        if slots <= (held - s.groups[group, c.SPARE]) * s.groups[group, c.SIZE]:
            return 0
        return count_blocks(s, group, slots) - held
    if has_spare == 0:
        return int(1 + s.groups[group, c.SPARE]) + _is_apart(s, group, tokens, loaded)
    return int(count_blocks(s, group, tokens) > held)  # a token that has not run has no state


@compiled
def _is_apart(s: State, group: int, tokens: int, loaded: int) -> int:
    """Return 1 if a state is loaded into another block than the chunk writes, else 0."""
    is_before = count_blocks(s, group, loaded) < count_blocks(s, group, tokens)
    return int(loaded > 0 and is_before)


@compiled
def find_quiet(s: State, slot: int) -> int:
    """Return the last slot up to which a row of a running request takes, publishes and leaves no
    block, in no group. It stays valid until the request frees its blocks."""
    quiet, is_cached = s.scalars[c.MAX_MODEL_LEN], s.scalars[c.HAS_CACHE] != 0
    for group in range(s.scalars[c.NUM_GROUPS]):
        size, kind, span = s.groups[group, c.SIZE], s.groups[group, c.KIND], s.groups[group, c.SPAN]
        end = (s.holdings[slot, group, c.LEFT] + 1) * size
        if kind != c.IS_CROSS:
            held = s.holdings[slot, group, c.HELD] - s.groups[group, c.SPARE]
            quiet = min(quiet, held * size)
        if is_cached:
            quiet = min(quiet, (s.holdings[slot, group, c.PUBLISHED] + 1) * size - 1)
        if kind == c.IS_WINDOW:
            quiet = min(quiet, end + span - 2)
        elif kind == c.IS_CHUNKED:
            quiet = min(quiet, (end + span - 1) // span * span - 1)
        elif kind >= c.IS_STATE:
            quiet = min(quiet, end)
    return int(quiet)


@compiled
def count_own(s: State, slot: int, group: int, slots: int) -> int:
    """Return the slots that a table needs if the text needs `slots`: cross attention holds the KV
    of the items from admission on, and does not grow with the text."""
    if s.groups[group, c.KIND] == c.IS_CROSS:
        return int(s.requests[slot, c.NUM_BESIDE])
    return slots


@compiled
def count_needed(s: State, slot: int, tokens: int) -> int:
    """Return the new blocks of all groups for the scheduled tokens and the lookahead (P8)."""
    end = s.requests[slot, c.NUM_COMPUTED] + tokens
    slots, needed = min(end + s.scalars[c.NUM_LOOKAHEAD], s.scalars[c.MAX_MODEL_LEN]), 0
    for group in range(s.scalars[c.NUM_GROUPS]):
        held, has_spare = s.holdings[slot, group, c.HELD], s.holdings[slot, group, c.HAS_SPARE]
        own = count_own(s, slot, group, slots)
        needed += count_missing(s, group, held, has_spare, end, own, 0)
    return needed


@compiled
def take_needed(s: State, slot: int, end: int, slots: int, loaded: int) -> None:
    """Append to the tables of a request, which gets the next row, what they lack for `end` tokens
    and `slots` slots, of which a store loads the first `loaded`."""
    row = s.scalars[c.NUM_ROWS]
    may_share = s.requests[slot, c.MAY_SHARE] != 0
    for group in range(s.scalars[c.NUM_GROUPS]):
        if may_share:
            _take_own(s, slot, group)
        held, has_spare = s.holdings[slot, group, c.HELD], s.holdings[slot, group, c.HAS_SPARE]
        own = count_own(s, slot, group, slots)
        missing = count_missing(s, group, held, has_spare, end, own, loaded)
        if missing > 0:
            if s.groups[group, c.KIND] == c.IS_ALIGNED:
                if has_spare == 0 and _is_apart(s, group, end, loaded) != 0:
                    s.block_tables[group, s.requests[slot, c.BATCH_ROW], held] = b.take_block(s)
                    s.holdings[slot, group, c.HELD] = held + 1
                    missing -= 1
                held = _move_spare(s, slot, group, count_blocks(s, group, end))
            for index in range(held, held + missing):
                s.block_tables[group, s.requests[slot, c.BATCH_ROW], index] = b.take_block(s)
            s.holdings[slot, group, c.HELD] = held + missing
            s.lines[row, c.ROW_BLOCKS + c.ROW_NUMBERS * group + 1] = held + missing


@compiled
def _move_spare(s: State, slot: int, group: int, end: int) -> int:
    """Make room for a state at the end of a table of `end` blocks; return its length then.

    Blocks between the last state and this one are null, and the spare blocks move behind it.

        one spare block    7 3    ->    7 3 4    ->    0 3 0 4 5    the last but one is the state
    """
    batch_row, held = s.requests[slot, c.BATCH_ROW], s.holdings[slot, group, c.HELD]
    spare, place = s.groups[group, c.SPARE], s.holdings[slot, group, c.HELD]
    state = end - 1 - spare
    first = held - spare if s.holdings[slot, group, c.HAS_SPARE] != 0 else held
    s.holdings[slot, group, c.HAS_SPARE] = 1
    while place < state:
        s.block_tables[group, batch_row, place] = NULL_BLOCK
        place += 1
    for index in range(first, min(held, state)):
        s.block_tables[group, batch_row, place] = s.block_tables[group, batch_row, index]
        s.block_tables[group, batch_row, index] = NULL_BLOCK
        place += 1
    return int(place)


@compiled
def count_copies(s: State, slot: int) -> int:
    """Return the shared blocks that the next token of a request is written to (P8)."""
    found = 0
    if s.scalars[c.HAS_FORKS] != 0 and s.requests[slot, c.MAY_SHARE] != 0:
        for group in range(s.scalars[c.NUM_GROUPS]):
            found += _find_shared(s, slot, group) != c.NONE
    return found


@compiled
def _find_shared(s: State, slot: int, group: int) -> int:
    """Return the index of the shared block that the next token is written to; NONE if it is not
    shared, or full and so not written to any more."""
    computed, size = s.requests[slot, c.NUM_COMPUTED], s.groups[group, c.SIZE]
    if computed % size == 0:
        return c.NONE
    block = s.block_tables[group, s.requests[slot, c.BATCH_ROW], computed // size]
    return int(computed // size) if s.blocks[block, c.REF_COUNT] > 1 else c.NONE


@compiled
def _take_own(s: State, slot: int, group: int) -> None:
    """Copy the shared block that the next token is written to; others hold the source."""
    index = _find_shared(s, slot, group)
    if index != c.NONE:
        batch_row, at = s.requests[slot, c.BATCH_ROW], s.scalars[c.NUM_COPIES]
        source, own = s.block_tables[group, batch_row, index], b.take_block(s)
        s.blocks[source, c.REF_COUNT] -= 1
        s.block_tables[group, batch_row, index] = own
        s.copies[at, 0], s.copies[at, 1], s.copies[at, 2] = slot, source, own
        s.scalars[c.NUM_COPIES] = at + 1


@compiled
def mark_known(s: State, slot: int) -> None:
    """Note the lengths of the tables before the next row of the step takes blocks."""
    row = s.scalars[c.NUM_ROWS]
    s.lines[row, c.ROW_LOOKS] = 1
    for group in range(s.scalars[c.NUM_GROUPS]):
        at, held = c.ROW_BLOCKS + c.ROW_NUMBERS * group, s.holdings[slot, group, c.HELD]
        s.lines[row, at] = s.lines[row, at + 1] = s.lines[row, at + 2] = held


@compiled
def list_all_blocks(s: State) -> None:
    """Let the plan list all blocks of the next row, and not only its new ones."""
    for group in range(s.scalars[c.NUM_GROUPS]):
        s.lines[s.scalars[c.NUM_ROWS], c.ROW_BLOCKS + c.ROW_NUMBERS * group] = 0


@compiled
def align(s: State, slot: int, computed: int, tokens: int) -> int:
    """Return the length of a row, shortened to end its chunk at a block of states if possible."""
    known = s.requests[slot, c.NUM_KNOWN]
    if computed >= max(s.requests[slot, c.NUM_PROMPT], known - 1):
        return int(tokens)
    unit, end = s.scalars[c.UNIT], computed + tokens
    last = (known - s.scalars[c.MOST_DROPPED]) // unit * unit
    for group in range(s.scalars[c.NUM_GROUPS]):
        begun = computed % s.groups[group, c.SIZE]
        if s.groups[group, c.KIND] == c.IS_ALIGNED and begun > 0:
            end = min(end, computed - begun + s.groups[group, c.SIZE])
    if end < last and end // unit * unit > computed:
        end = end // unit * unit
    elif computed < last < end:
        end = last
    return int(end - computed)


# Hits, and admission


@compiled
def _find(s: State, group: int, index: int) -> int:
    """Return a block with the content of block `index` of this group, or NONE; `scratch` has the
    nodes of the request."""
    node = s.scratch[(index + 1) * s.groups[group, c.LINKS] - 1]
    block = s.carriers[node, group, c.FIRST_BLOCK]
    if block == c.NONE or s.groups[group, c.KIND] < c.IS_STATE:
        return int(block)
    return c.NONE if s.blocks[block, c.STATE_STEP] == s.scalars[c.STEP] else int(block)


@compiled
def find_hits(s: State, slot: int) -> int:
    """Return the tokens of the longest prefix that is a hit in all groups, at least one token left
    (P5; upstream #30320).

    The length is lowered until every group has all blocks that it needs. An EAGLE head needs the
    last hit block computed again (seed 001, "find_longest_cache_hit").
    """
    b.list_nodes(s, s.requests[slot, c.LAST_NODE], s.requests[slot, c.NUM_FULL], s.scratch)
    longest, unit = s.requests[slot, c.NUM_KNOWN], s.scalars[c.UNIT]
    for group in range(s.scalars[c.NUM_GROUPS]):
        size, dropped = s.groups[group, c.SIZE], s.groups[group, c.DROPPED]
        most = (s.requests[slot, c.NUM_KNOWN] - 1) // size
        if s.groups[group, c.KIND] == c.IS_FULL:
            found = 0
            while found < most and _find(s, group, found) != c.NONE:
                found += 1
            most = found
        longest = min(longest, (most - dropped) * size)
    length = longest // unit * unit
    while length > 0:
        longest = length
        for group in range(s.scalars[c.NUM_GROUPS]):
            if s.groups[group, c.KIND] != c.IS_FULL:
                longest = min(longest, _shorten(s, group, length))
        if longest == length:
            return int(length)
        length = longest // unit * unit
    return 0


@compiled
def _shorten(s: State, group: int, length: int) -> int:
    """Return `length` if it is a valid hit of the group, else an upper bound of the shorter ones:
    all longer hits that include the missing block need it, too."""
    size, dropped = s.groups[group, c.SIZE], s.groups[group, c.DROPPED]
    for index in range(length // size + dropped - 1, find_first_read(s, group, length) - 1, -1):
        if _find(s, group, index) == c.NONE:
            return int((index - dropped) * size)
    return int(length)


@compiled
def fits(s: State, slot: int, hit: int, start: int, tokens: int) -> bool:
    """Whether there are blocks for `tokens` tokens after the first `start`, and for the whole
    request if its config asks for that (P7, P11, P15).

    The first `hit` tokens are a hit, and those up to `start` are loaded.

    A hit that others hold too saves no block once a window has moved past it: they keep it, and the
    following blocks come from the free ones.
    """
    needed, whole, known, free = 0, 0, s.requests[slot, c.NUM_KNOWN], count_free(s)
    for group in range(s.scalars[c.NUM_GROUPS]):
        hits, first, unheld = hit // s.groups[group, c.SIZE], find_first_read(s, group, start), 0
        for index in range(first, hits):
            unheld += s.blocks[_find(s, group, index), c.REF_COUNT] == 0
        held, own = max(hits, first), count_own(s, slot, group, start + tokens)
        loaded = start if start > hit else 0
        needed += count_missing(s, group, held, 0, start + tokens, own, loaded) + unheld
        all_own = count_own(s, slot, group, known)
        most = count_blocks(s, group, min(all_own, s.groups[group, c.MOST_SLOTS]))
        most = min(most, s.groups[group, c.MOST_BLOCKS])
        whole += min(count_blocks(s, group, all_own) - held + unheld, most)
    reserved = whole if s.scalars[c.RESERVES_WHOLE] != 0 else 0
    return bool(max(needed, reserved) <= free)


@compiled
def count_free(s: State) -> int:
    """Return the free blocks that an admission may take."""
    kept = s.scalars[c.NUM_KEPT_FREE] if s.scalars[c.NUM_RUNNING] > 0 else 0
    return int(s.scalars[c.NUM_FREE] - kept)


@compiled
def adopt(s: State, slot: int, hit: int, start: int) -> None:
    """Hold the hits that are read behind the first `start` tokens, of all groups, before any group
    takes a new block: the head of the free queue could be a hit (upstream #33775)."""
    batch_row, row = s.requests[slot, c.BATCH_ROW], s.scalars[c.NUM_ROWS]
    s.lines[row, c.ROW_LOOKS] = 1
    for group in range(s.scalars[c.NUM_GROUPS]):
        hits, first = hit // s.groups[group, c.SIZE], find_first_read(s, group, start)
        held = max(hits, first)
        for index in range(held):
            block = NULL_BLOCK
            if index >= first:
                block = _find(s, group, index)
                b.touch(s, block)
            s.block_tables[group, batch_row, index] = block
        s.holdings[slot, group, c.HELD], s.holdings[slot, group, c.PUBLISHED] = held, hits
        s.holdings[slot, group, c.LEFT] = first
        at = c.ROW_BLOCKS + c.ROW_NUMBERS * group
        s.lines[row, at], s.lines[row, at + 1], s.lines[row, at + 2] = 0, held, held


@compiled
def fits_behind(s: State, slot: int, tokens: int) -> bool:
    """Whether there are blocks for `tokens` tokens of a session or branch behind its computed ones,
    and for all of its known ones if its config asks for that (P7, P11, P15)."""
    computed, known = s.requests[slot, c.NUM_COMPUTED], s.requests[slot, c.NUM_KNOWN]
    batch_row, free = s.requests[slot, c.BATCH_ROW], count_free(s)
    needed, whole, end = count_copies(s, slot), 0, computed + tokens
    has_fence = b.is_fenced(s, slot)
    for group in range(s.scalars[c.NUM_GROUPS]):
        held, first = s.holdings[slot, group, c.HELD], find_first_read(s, group, computed)
        for index in range(s.holdings[slot, group, c.LEFT], 0 if has_fence else first):
            free += s.blocks[s.block_tables[group, batch_row, index], c.REF_COUNT] == 1
        slots, has_spare = count_own(s, slot, group, end), s.holdings[slot, group, c.HAS_SPARE]
        needed += count_missing(s, group, held, has_spare, end, slots, 0)
        own = 0
        for index in range(first, held):
            own += s.blocks[s.block_tables[group, batch_row, index], c.REF_COUNT] == 1
        if s.groups[group, c.KIND] == c.IS_CROSS:
            continue  # all its blocks are held already
        most = count_blocks(s, group, min(known, s.groups[group, c.MOST_SLOTS]))
        most = min(most, s.groups[group, c.MOST_BLOCKS])
        later = count_blocks(s, group, known) - held
        if s.requests[slot, c.MAY_SHARE] != 0:
            later += _find_shared(s, slot, group) != c.NONE
        whole += max(min(later, most - own), 0)
    reserved = whole if s.scalars[c.RESERVES_WHOLE] != 0 else 0
    return bool(max(needed, reserved) <= free)


# The common prefix


@entry("state", "int")
def count_common(s: State, group: int) -> int:
    """Return the leading blocks that all running requests share in a group with full attention
    (P26).

    Only running requests hold blocks, each of them a block once: a block with as many holders as
    requests run is in all tables. Blocks taken later are not shared, so the count stays until a
    request starts or ceases to hold a cached block.
    """
    running = s.scalars[c.NUM_RUNNING]
    if running == 0 or s.groups[group, c.KIND] != c.IS_FULL or s.scalars[c.HAS_CACHE] == 0:
        return 0
    slot = s.lines[0, c.RUNNING]
    held, batch_row = s.holdings[slot, group, c.HELD], s.requests[slot, c.BATCH_ROW]
    if running == 1:
        return int(held)
    if s.scalars[c.NUM_SESSIONS] + s.scalars[c.NUM_HOLDERS] > 0 or (
        s.scalars[c.HAS_FORKS] + s.scalars[c.HAS_STORE] > 0
    ):
        return _compare_tables(s, group)
    moves = s.scalars[c.NUM_MOVES]
    known = s.groups[group, c.COMMON_RUNNING] == running
    if not known or s.groups[group, c.COMMON_MOVES] != moves:
        found = 0
        while found < held:
            if s.blocks[s.block_tables[group, batch_row, found], c.REF_COUNT] != running:
                break
            found += 1
        s.groups[group, c.COMMON] = found
        s.groups[group, c.COMMON_RUNNING], s.groups[group, c.COMMON_MOVES] = running, moves
    return int(s.groups[group, c.COMMON])


@compiled
def _compare_tables(s: State, group: int) -> int:
    """Return the same where others hold blocks, too."""
    first = s.lines[0, c.RUNNING]
    common = s.holdings[first, group, c.HELD]
    for position in range(1, s.scalars[c.NUM_RUNNING]):
        if common == 0:
            break
        slot, found = s.lines[position, c.RUNNING], 0
        common = min(common, s.holdings[slot, group, c.HELD])
        one, other = s.requests[first, c.BATCH_ROW], s.requests[slot, c.BATCH_ROW]
        while found < common:
            if s.block_tables[group, one, found] != s.block_tables[group, other, found]:
                break
            found += 1
        common = found
    return int(common)
