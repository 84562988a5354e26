"""Per-request virtual-batch attention."""
