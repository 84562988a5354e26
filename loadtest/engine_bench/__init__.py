"""`blockserve bench engine`: the torch engine in process, next to vLLM and transformers on the same CPU."""
