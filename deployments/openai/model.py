"""The base of all request bodies."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

logger = logging.getLogger(__name__)


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
