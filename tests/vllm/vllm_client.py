"""What the tests of the vLLM engine share: requests, and the one consumer of an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from configs.schema import ModelConfig
from replicas.protocol import DiffusionParams, GenerationRequest, RequestOutput, SamplingParams
from replicas.vllm_engine.engine import VllmEngine

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
QWEN, LLADA2 = "qwen3_dense_untied", "llada2_b32"


def config_of(path: str | Path, **engine) -> ModelConfig:
    arguments = {
        "backend": "vllm",
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
    }
    return ModelConfig.model_validate({"name": "m", "path": str(path), "engine": arguments | engine})


def cases(name: str, file: str) -> list[dict]:
    return json.loads((GOLDEN / name / file).read_text())


def request(
    request_id: str, prompt: Iterable[int], diffusion: DiffusionParams | None = None, **sampling
) -> GenerationRequest:
    return GenerationRequest(request_id, "m", tuple(prompt), SamplingParams(**sampling), diffusion)


class Client:
    """The one consumer of an engine, in a thread of its own, and what has come for each request."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._outputs: dict[str, list[RequestOutput]] = {}
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read()), daemon=True)
        self._thread.start()

    async def _read(self) -> None:
        try:
            async for step in self.engine.steps():
                with self._arrived:
                    for output in step.outputs:
                        self._outputs.setdefault(output.request_id, []).append(output)
                    self._arrived.notify_all()
        except Exception as error:
            self.error = error
        with self._arrived:
            self._arrived.notify_all()

    def wait(self, request_id: str, until: Callable[[list[RequestOutput]], bool]) -> list[RequestOutput]:
        """The request's outputs, once ``until`` holds of them."""
        with self._arrived:
            came = self._arrived.wait_for(lambda: until(self._outputs.get(request_id, [])), timeout=60)
            assert came, f"{request_id}: {self._outputs.get(request_id)}, {self.error}"
            return self._outputs[request_id]

    def finish(self, request_id: str) -> RequestOutput:
        """One output with all tokens and logprobs, and the last counters."""
        outputs = self.wait(request_id, lambda found: bool(found) and found[-1].finished)
        last = outputs[-1]
        last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
        if any(output.logprobs for output in outputs):
            last.logprobs = [entry for output in outputs for entry in output.logprobs or []]
        with self._arrived:
            del self._outputs[request_id]
        return last

    def forget(self) -> None:
        with self._arrived:
            self._outputs.clear()

    def run(self, *requests: GenerationRequest) -> list[RequestOutput]:
        for one in requests:
            self.engine.submit(one)
        return [self.finish(one.request_id) for one in requests]

    def tokens(self, *requests: GenerationRequest) -> list[list[int]]:
        outputs = self.run(*requests)
        assert [output.error for output in outputs] == [None] * len(outputs)
        return [output.new_token_ids for output in outputs]

    def close(self) -> None:
        self.engine.shutdown()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


def start(name: str, **engine) -> Client:
    from replicas.vllm_engine.loading import load_vllm_engine

    return Client(load_vllm_engine(config_of(GOLDEN / name, **engine), GOLDEN / name))
