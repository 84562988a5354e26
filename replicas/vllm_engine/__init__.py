"""The engine on vLLM: ``AsyncLLM`` behind the ``Engine`` protocol."""
