"""Worker: a model worker that believes nothing but the plans, and remembers what each slot holds.

`names` gives every prefix a name, `view` is what the worker knows of one request, `kv` what each
slot holds, `sampling` what follows a text, `worker` runs plans. It is a witness (architecture D6):
what it says against a plan needs no reference.
"""

from blockstep.conformance.judge.worker.names import PrefixNames, extras_of
from blockstep.conformance.judge.worker.sampling import NextToken
from blockstep.conformance.judge.worker.worker import Worker, make_worker

__all__ = ["NextToken", "PrefixNames", "Worker", "extras_of", "make_worker"]
