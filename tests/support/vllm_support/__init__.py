"""What tests know of the releases of vLLM without having one."""
