"""Worker: a model of a GPU worker that knows only the plans and remembers what each slot holds.

`names` gives every prefix a name, `view` is what the worker knows of one request, `kv` what each
slot holds, `sampling` the next token of a sequence, `worker` runs plans. It is a witness
(architecture D6): what it finds wrong with a plan needs no reference.
"""

from blockstep.conformance.judge.worker.prefix_names import PrefixNames, extras_of
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.worker import Worker, make_worker

__all__ = ["NextToken", "PrefixNames", "Worker", "extras_of", "make_worker"]
