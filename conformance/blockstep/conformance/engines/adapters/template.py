"""Adapter of a scheduler, through which Blockstep drives it.

    blockstep check --engine NAME:make

What is not filled in yet is a finding, with the program that needs it. `blockstep explain Plan`
(or NewRow, CachedRow, Outputs, abort, ...) says what a word means.
"""

from __future__ import annotations

from blockstep.conformance.engine import Capability, EngineFault, EngineTraits, Safety
from blockstep.spec import vocabulary as v


# --- only at safety
def fit_config(config: v.Config) -> v.Config:
    """Return the nearest config that the scheduler takes: here its sizes, and no prefix caching."""
    return v.Config(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=False,
    )


def fit_request(request: v.Request, _config: v.Config) -> v.Request:
    """Return the nearest request that the scheduler takes: here a prompt and a length."""
    return v.Request(request.request_id, request.prompt_token_ids, request.max_tokens)


# --- always
class Adapter:
    """One run of the scheduler: built from a config, used once."""

    # --- only at safety
    traits = EngineTraits(
        equivalence=Safety(fit_config, fit_request),
        out_of_reach=frozenset(),  # unreachable goals: {"preempted"} if it never preempts
    )

    # --- always
    def __init__(self, config: v.Config) -> None:
        self.config = config
        # Build the scheduler here. Its blocks are 1 to config.num_blocks - 1: 0 is the null block.

    def capabilities(self) -> frozenset[str]:
        """Return what it takes besides Submit, Schedule and Commit.

        The rest is never sent.

        `blockstep explain capabilities` lists the capabilities. ADAPTERS, MASKS (with GRAMMAR),
        SESSIONS and ENCODER have fields in requests and plans, and all but the first have events of
        their own (`blockstep explain StreamingUpdate`, ...).
        """
        return frozenset({Capability.ABORT})

    def snapshot(self) -> v.Snapshot | None:
        """Return its state after the last event, or None: then only its observations are
        checked.
        """
        return None

    def apply(self, event: v.Event) -> v.Observation:
        """Take one event. An exception that is raised here is a finding."""
        match event:
            case v.Submit(request=request):
                return self.submit(request)
            case v.Schedule():
                return self.schedule()
            case v.Commit(frame_id=frame_id, sampled=sampled):
                return self.commit(frame_id, sampled)
            case v.Abort(request_ids=request_ids):
                return self.abort(request_ids)
        raise EngineFault(f"{type(event).__name__} is not handled, and no capability requires it")

    def submit(self, request: v.Request) -> v.Ack:
        """Take a new request: token ids of its prompt, and how many tokens may follow."""
        raise EngineFault("submit() is not filled in: hand the request over, and return v.Ack()")

    def schedule(self) -> v.Plan:
        """Plan one step; a plan without rows is right if nothing can run.

        v.NewRow: the request, all its blocks, its prefix hit, its tokens of this step.

        v.CachedRow: a request that has had a row, with the blocks that it got since. `resumed` is
        True if it was preempted meanwhile: then these are all its blocks. `all_token_ids` is its
        prompt and outputs if it was not in the previous plan, else None.

        finished_req_ids: requests that finished since the previous plan, sorted.
        """
        raise EngineFault("schedule() is not filled in: run a step, and return v.Plan(...)")

    def commit(self, frame_id: v.FrameId, sampled: tuple[v.RowTokens, ...]) -> v.Outputs:
        """Take the model output of a plan: the sampled tokens of each row, () within a prompt.

        Return a v.OutputRow for each row that sampled and has not finished meanwhile, with the
        reason if it finishes now.
        """
        raise EngineFault("commit() is not filled in: take the tokens, and return v.Outputs(...)")

    def abort(self, request_ids: tuple[v.RequestId, ...]) -> v.Aborted:
        """Abort requests, at any time. Ids that are unknown or finished change nothing."""
        raise EngineFault("abort() is not filled in: end them, and return v.Aborted(their ids)")


make = Adapter
"""The factory that `--engine NAME:make` calls with a config."""
