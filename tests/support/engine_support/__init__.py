"""Tiny models for tests of the model engine, and the tokens that transformers generates."""
