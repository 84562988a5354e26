"""The base of all request bodies."""

from __future__ import annotations

import json
import logging
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

logger = logging.getLogger(__name__)


def check_unicode(value: Any) -> None:
    """Raises ``ValueError`` for a parsed JSON value with half a surrogate pair in it, which has no UTF-8 form.
    (In a body itself they are refused where it is read; a text in it may be JSON once more.)"""
    json.dumps(value, ensure_ascii=False).encode("utf-8")


class RequestModel(BaseModel):
    """Base of all bodies and of the objects in them."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data

    @model_validator(mode="after")
    def _log_unknown(self) -> RequestModel:
        if self.model_extra and logger.isEnabledFor(logging.DEBUG):
            names = ", ".join(repr(name)[:64] for name in list(self.model_extra)[:32])
            logger.debug("%s: unknown keys ignored: %s", type(self).__name__, names)
        return self
