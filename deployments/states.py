"""Which models can serve now, kept fresh by a background poll of all replicas."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from configs.schema import ModelConfig
from deployments.openai.contracts import ModelState
from replicas.protocol import EngineStats

logger = logging.getLogger("ray.serve")

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 3.0
#: One replica that does not answer fails a whole poll, so older answers stay valid for this long (seconds).
STATE_LIFETIME_S = 15.0


class StatePoller:
    """Asks every replica of every model for its ``engine_stats`` once a second."""

    def __init__(self, models: Iterable[ModelConfig], handles: Mapping[str, Any]) -> None:
        self._models = {model.name: model for model in models}
        self._handles = handles
        self._replicas: dict[str, dict[str, EngineStats]] = {name: {} for name in self._models}
        self._polled_at: dict[str, float] = {}

    def states(self) -> dict[str, ModelState]:
        return {name: self._state(name) for name in self._models}

    def _state(self, name: str) -> ModelState:
        replicas = self._replicas[name]
        age_s = time.monotonic() - self._polled_at.get(name, float("-inf"))
        if replicas and age_s <= STATE_LIFETIME_S:
            return ModelState(True, replicas=dict(replicas))
        if replicas:
            return ModelState(False, f"the replicas have not answered for {age_s:.0f} s")
        if self._models[name].autoscaling.min_replicas == 0:
            return ModelState(True)  # scaled to zero: a request starts a replica
        return ModelState(False, "no replica is up: the model is loading, or could not be loaded")

    async def run(self) -> None:
        """Polls until it is cancelled."""
        # One loop per model, each in a clean context (see BatchingDispatcher._spawn).
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(self._poll_model(name), context=contextvars.Context()) for name in self._models
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _poll_model(self, name: str) -> None:
        while True:
            try:
                await self.poll_once(name)
            except Exception as error:
                logger.debug("Polling the replicas of %s failed: %r", name, error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def poll_once(self, name: str) -> None:
        """One poll of one model's replicas. A replica that fails to answer is left out."""
        try:
            response = self._handles[name].broadcast("engine_stats")
            answers = await response.results_async(timeout_s=POLL_TIMEOUT_S, return_exceptions=True)
        except TimeoutError:
            return  # keep the last answers; their age is watched
        except Exception:  # DeploymentUnavailableError: no replica is up
            self._replicas[name] = {}
            return
        self._replicas[name] = dict(answer for answer in answers if not isinstance(answer, BaseException))
        self._polled_at[name] = time.monotonic()
