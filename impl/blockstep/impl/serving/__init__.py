"""Serving: what stands around an engine that serves, and what others read of it.

`wire` is how KV events are written, `journal` numbers and keeps what was written, `mirror` is who
reads it, and `sockets` carries it over ZeroMQ (extra `events`). `waiting` says why requests wait,
`meter` what vLLM's metrics would, and `export` shows it to Prometheus (extra `metrics`).
"""
