"""Adapter of a scheduler: how Blockstep drives it.

    blockstep check --engine NAME:make

What is not filled in yet is a finding, with the program that needs it. `blockstep explain Plan`
(or NewRow, CachedRow, Outputs, abort, ...) says what a word means.
"""

from __future__ import annotations

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, Safety
from blockstep.spec import vocabulary as v


# --- only at safety
def fit_config(config: v.Config) -> v.Config:
    """The nearest config that the scheduler can be built with: here its sizes, and no caching."""
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=False,
    )


def fit_request(request: v.Request, _config: v.Config) -> v.Request:
    """The nearest request that it understands: here a prompt and a length."""
    return v.Request(request.request_id, request.prompt_token_ids, request.max_tokens)


# --- always
class Adapter:
    """One run of the scheduler: built from a config, used once."""

    # --- only at safety
    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request),
        out_of_reach=frozenset(),  # what cannot come up: {"preempted"} if nobody loses its blocks
    )

    # --- always
    def __init__(self, config: v.Config) -> None:
        self.config = config
        # Build the scheduler here. Its blocks are 1 to config.num_blocks - 1: 0 is the null block,
        # which nobody holds.

    def capabilities(self) -> frozenset[str]:
        """What it takes besides Submit, Schedule and Commit. What is not named is never sent.

        `blockstep explain capabilities` lists what there is. ADAPTERS, MASKS (with GRAMMAR),
        SESSIONS and ENCODER are what requests bring: each has fields in requests and plans, and
        all but the first have events of their own (`blockstep explain StreamingUpdate`, ...).
        """
        return frozenset({Capability.ABORT})

    def snapshot(self) -> v.Snapshot | None:
        """Its state after the last event, or None: then it is judged by its answers alone."""
        return None

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. What is raised here is a finding."""
        match event:
            case v.Submit(request=request):
                return self.submit(request)
            case v.Schedule():
                return self.schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled):
                return self.commit(frame_id, sampled)
            case v.Abort(request_ids=request_ids):
                return self.abort(request_ids)
        raise EngineFault(f"{type(event).__name__} is not taken, and no capability promises it")

    def submit(self, request: v.Request) -> v.Ack:
        """A client hands in a request: ids of its prompt's tokens, and how many may follow."""
        raise EngineFault("submit() is not filled in: hand the request over, and return v.Ack()")

    def schedule(self) -> v.Plan:
        """Plan one step. A plan without rows is right where nothing can run.

        v.NewRow: its request, all its blocks, tokens found in the cache, tokens of this step.
        v.CachedRow: a request that has had a row, with the blocks that it got since. `resumed` is
        True if it was preempted meanwhile: then they are all its blocks. `all_token_ids` is its
        prompt and outputs if it was not in the plan before, else None.
        finished_req_ids: who has ended since the plan before, sorted.
        """
        raise EngineFault("schedule() is not filled in: run a step, and return v.Plan(...)")

    def commit(self, frame_id: v.FrameId, sampled: tuple[v.RowTokens, ...]) -> v.Outputs:
        """The model's answer to the plan of this id: what each row sampled, () within a prompt.

        Deliver a v.OutputRow for each that sampled and has not ended meanwhile, with the reason if
        it ends now.
        """
        raise EngineFault("commit() is not filled in: take the tokens, and return v.Outputs(...)")

    def abort(self, request_ids: tuple[v.RequestId, ...]) -> v.Aborted:
        """Clients give up, at any time. Ids that are not known, or ended, change nothing."""
        raise EngineFault("abort() is not filled in: end them, and return v.Aborted(their ids)")


make = Adapter
"""What `--engine NAME:make` calls with a config."""
