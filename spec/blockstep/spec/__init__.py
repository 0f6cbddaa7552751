"""The executable specification of an LLM-inference scheduler and its paged KV memory."""
