"""Seeds and prompts in several chunks, together, on vLLM's CPU build.

vLLM draws a token after each chunk of a prompt and throws it away unless the chunk was the last. A request with a seed
must not notice: on a GPU vLLM turns its generator back, in a way that generators on a CPU do not know. There the step
fails, and with it the engine of everybody.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def keep_seeds_of_chunked_prompts() -> None:
    """Makes the CPU's model runner put back the state of a generator whose token is thrown away; safe to call again.

    Elsewhere, and where the runner has changed, nothing happens.
    """
    try:
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    except ImportError:  # a build without it
        return
    runner: Any = CPUModelRunner
    known = all(hasattr(runner, name) for name in ("_sample", "_bookkeeping_sync"))
    if not known or getattr(runner, "_blockserve_seeds", False):
        return
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync

    def sample_and_turn_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = [(generator, generator.get_state()) for generator in _thrown_away(self).values()]
        output = sample(self, *args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    def bookkeeping_of_the_rest(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch, thrown_away = self.input_batch, _thrown_away(self)
        for index in thrown_away:
            del batch.generators[index]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            batch.generators.update(thrown_away)

    runner._sample, runner._bookkeeping_sync = sample_and_turn_back, bookkeeping_of_the_rest
    runner._blockserve_seeds = True


def _thrown_away(runner: Any) -> dict[int, Any]:
    """Generators, by batch row, of requests whose token of this step does not count."""
    generators = runner.input_batch.generators
    rows = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs]).tolist()
    return {row: generators[row] for row in rows if row in generators}
