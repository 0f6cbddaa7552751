"""Tiny models for tests of the model engine, and what transformers makes of them."""
