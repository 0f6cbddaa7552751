"""The optimized implementation. It shares the spec's vocabulary, and none of its rules (D3)."""
