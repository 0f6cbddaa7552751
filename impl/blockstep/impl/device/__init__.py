"""The scheduler's state on a GPU, and the kernels that change it.

`layout` lists the tensors, and `dims` says how long they are. The kernels are Triton, a module per
phase: `pool` (free blocks), `contents` (what can be found), `lives` (queues, preemption, ends),
`commands` (what the host asks for), `running` and `waiting` (the plan), `inputs` (where its tokens
stand), `results` (the answer), `sweep` (frees unused nodes) and `step` (what is launched).
Around them, on the host: `engine`, with the `inbox` that it writes (and `growth`), the `frames`
that it reads, the `view` of a snapshot, and `launch`, which runs kernels by numpy, and
`interpreted`, which has Triton do it.
"""
