"""Core: what every scheduler of this kind has. It names no feature and no release.

Read it in this order: the values `requests`, `block_pool`, `state` and `work`; the memory,
`prefix_cache` and `slots`; one step, `schedule` with `queues`, `token_budget`, `preemption`,
`admission` and `plans`; what happens between two steps, `async_`, `speculation`, `commit`,
`endings` and `lifecycle`; and where features take part, `rules`, `hooks`, `parts` and `feature`.
"""
