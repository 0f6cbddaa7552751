"""The scheduler's state on a GPU, and the kernels that change it.

`layout` lists the tensors, and `dims` their lengths. The kernels are Triton, a module per phase:
`pool` (free blocks), `prefix_cache`, `queues` (and preemption and finish), `commands` (events from
the host), `running` and `waiting` (the plan), `inputs` (the slots of its tokens), `results` (the
commit), `node_gc` (frees unused nodes) and `step` (what is launched). Around them, on the host:
`engine`, with the `inbox` that it writes (and `growth`), the `frames` that it reads, the `view` of
a snapshot, and `launch`, which runs kernels by numpy; `interpreted` runs them by Triton's
interpreter."""
