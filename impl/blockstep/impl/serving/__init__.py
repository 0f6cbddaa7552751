"""Serving: KV events, metrics and pin estimates of an engine that serves.

`wire` encodes KV events, `journal` numbers and keeps the encoded batches, `mirror` rebuilds the
prefix cache from them, and `sockets` carries them over ZeroMQ (extra `events`). `waiting` says why
requests wait, `meter` computes vLLM's metrics, and `export` hands them to Prometheus (extra
`metrics`). `steps` writes a record of each step, `estimator` decides how long blocks are pinned.
"""
