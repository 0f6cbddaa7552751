"""Recorded runs: replays of workloads, traces, and their validation."""
