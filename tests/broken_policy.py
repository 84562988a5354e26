"""A policy whose rule always fails, where Serve's controller can import it."""

from __future__ import annotations

from typing import Any

from deployments.autoscaling import QueueDepthPolicy


class BrokenPolicy(QueueDepthPolicy):
    def _decide(self, ctx: Any) -> int:
        raise RuntimeError("broken on purpose")
