"""Ranks as Ray actors in the placement group of the replica that is rank 0."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from replicas.errors import ModelLoadError
from replicas.parallel.worker import OnExit, RankSpec, run_rank

logger = logging.getLogger(__name__)


def current_placement_group() -> Any | None:
    """The placement group that this process runs in; None outside Ray and outside of any."""
    ray = sys.modules.get("ray")  # who runs in an actor has imported it
    if ray is None or not ray.is_initialized():
        return None
    return ray.util.get_current_placement_group()


class RayLauncher:
    """Rank r is an actor in bundle r of ``placement_group`` with all of that bundle's CPUs and GPUs; this process has
    bundle 0. Ray ends the actors when this process ends. Raises ``ModelLoadError`` when there are too few bundles.
    """

    def __init__(self, placement_group: Any, size: int) -> None:
        import ray

        self._bundles = placement_group.bundle_specs
        if len(self._bundles) < size:
            raise ModelLoadError(
                f"`tensor_parallel_size` {size} needs as many bundles, but the replica's placement group has "
                f"{len(self._bundles)}"
            )
        self._placement_group = placement_group
        self.host: str = ray.util.get_node_ip_address()
        self._actors: list[Any] = []
        self._watcher: threading.Thread | None = None

    def device(self, kind: str, rank: int) -> str:
        return "cuda:0" if kind == "cuda" else kind  # an actor sees its own GPU only

    def launch(self, specs: Sequence[RankSpec], on_exit: OnExit) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        running: dict[Any, int] = {}
        for spec in specs:
            bundle = self._bundles[spec.rank]
            actor: Any = (
                ray.remote(RankActor)
                .options(
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._placement_group, placement_group_bundle_index=spec.rank
                    ),
                )
                .remote()
            )
            self._actors.append(actor)
            running[actor.run.remote(spec)] = spec.rank
        self._watcher = threading.Thread(
            target=_watch, args=(running, on_exit), name="tensor-parallel-ranks", daemon=True
        )
        self._watcher.start()

    def kill(self) -> None:
        import ray

        for actor in self._actors:
            try:
                ray.kill(actor)
            except Exception:
                logger.exception("killing a rank failed")

    def join(self, timeout_s: float) -> bool:
        if self._watcher is not None:
            self._watcher.join(timeout_s)
            if self._watcher.is_alive():
                return False
        self.kill()  # their work has ended; the processes go with the actors
        return True


class RankActor:
    """One rank's process."""

    def run(self, spec: RankSpec) -> None:
        import ray

        run_rank(spec, ray.util.get_node_ip_address())


def _watch(running: dict[Any, int], on_exit: OnExit) -> None:
    import ray

    while running:
        (done,), _ = ray.wait(list(running), num_returns=1)
        rank = running.pop(done)
        try:
            ray.get(done)
            how = "has ended"
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            how = f"ended by {type(error).__name__}: {lines[-1] if lines else ''}"
        on_exit(rank, how)
