"""Facts about the releases of vLLM that tests use without an installed one."""
