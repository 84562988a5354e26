"""Blockserve's HTTP server next to vLLM's own, on the same engine (``blockserve bench server``)."""
