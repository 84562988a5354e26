"""The torch engine: KV slots, scheduler, step loop."""
