"""The framing of server-sent events."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def frame(data: dict[str, Any], event: str | None = None) -> bytes:
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
