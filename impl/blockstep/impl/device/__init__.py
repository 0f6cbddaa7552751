"""The scheduler's state on a GPU, and the kernels that change it.

`layout` lists the tensors, and `dims` their lengths. The kernels are Triton, a module per phase:
`pool` (free blocks), `contents` (prefix cache), `lives` (queues, preemption, finish), `commands`
(events from the host), `running` and `waiting` (the plan), `inputs` (the slots of its tokens),
`results` (the commit), `sweep` (frees unused nodes) and `step` (what is launched). Around them, on
the host: `engine`, with the `inbox` that it writes (and `growth`), the `frames` that it reads, the
`view` of a snapshot, and `launch`, which runs kernels by numpy; `interpreted` runs them by Triton's
interpreter.
"""
