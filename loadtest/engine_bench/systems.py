"""The systems under test behind one interface: load a checkpoint, run requests, say when each token came."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.engine_bench.spec import PAGE_TOKENS, TimedRequest, WorkerSpec
from loadtest.engine_bench.timeline import Timeline, drive


class System(ABC):
    """A loaded model. ``num_slots``: requests that may run at once."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    @abstractmethod
    def run(self, requests: Sequence[TimedRequest], num_slots: int | None = None) -> Timeline:
        """Runs all requests; None is ``spec.max_num_seqs`` slots."""


class Blockserve(System):
    """Our engine, as a replica builds it; stepped here instead of by its thread.

    Engines with other numbers of slots share the loaded model, so a comparison of them compares slots only.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        from configs.schema import EngineConfig, ModelConfig
        from replicas.engine.core import EngineCore

        engine: dict[str, Any] = {
            "device": "cpu",
            "dtype": spec.dtype,
            "max_num_seqs": spec.max_num_seqs,
            "max_model_len": spec.max_model_len,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "num_threads": spec.threads,
            "enable_prefix_caching": False,
        }
        config = ModelConfig(name="bench", path=spec.checkpoint, engine=EngineConfig(**engine))
        core = EngineCore.from_config(config, spec.checkpoint)
        self._cores = {spec.max_num_seqs: core}
        self._info = core.info
        self._model = core.engine.model
        self._runs = 0

    def run(self, requests: Sequence[TimedRequest], num_slots: int | None = None) -> Timeline:
        from replicas.protocol import DiffusionParams, GenerationRequest, SamplingParams

        core = self.core(num_slots or self.spec.max_num_seqs)
        self._runs += 1
        prefix = f"{self._runs}-"
        diffusion = None
        if self._info.is_diffusion:
            diffusion = DiffusionParams(steps=self.spec.steps, threshold=self.spec.threshold)
        counts = {"forwards": 0, "deciding_forwards": 0, "commit_forwards": 0, "row_forwards": 0}
        before = core.stats()

        def submit(index: int, request: TimedRequest) -> None:
            sampling = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, seed=0)
            prompt = tuple(request.prompt_token_ids)
            core.submit(GenerationRequest(f"{prefix}{index}", "bench", prompt, sampling, diffusion))

        def step() -> Mapping[int, Sequence[int]]:
            nonlocal before
            outputs = core.step().outputs
            after = core.stats()
            forwards = after.num_forwards - before.num_forwards
            rows = after.num_denoise_row_forwards - before.num_denoise_row_forwards
            counts["forwards"] += forwards
            counts["row_forwards"] += rows
            counts["deciding_forwards"] += bool(rows)
            # Beside the one forward of a step that decides or computes prompts, others only store finished blocks.
            counts["commit_forwards"] += forwards - bool(
                rows or after.num_prefill_tokens > before.num_prefill_tokens
            )
            before = after
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error.message)
            return {int(output.request_id.removeprefix(prefix)): output.new_token_ids for output in outputs}

        timeline = drive(requests, submit, step, core.has_work)
        if self._info.is_diffusion:
            timeline.counters = counts
        return timeline

    def core(self, num_slots: int) -> Any:
        from replicas.engine.core import EngineCore

        if num_slots not in self._cores:
            self._cores[num_slots] = EngineCore.from_model(
                self._model,
                self._info,
                max_num_seqs=num_slots,
                max_num_batched_tokens=self.spec.max_num_batched_tokens,
                enable_prefix_caching=False,
            )
        return self._cores[num_slots]


class Vllm(System):
    """vLLM's engine inside this process, stepped here. ``eager`` False lets it compile the model."""

    def __init__(self, spec: WorkerSpec, *, eager: bool) -> None:
        super().__init__(spec)
        from vllm import LLM

        self._engine = LLM(
            model=spec.checkpoint,
            dtype=spec.dtype,
            enforce_eager=eager,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            block_size=PAGE_TOKENS,
            kv_cache_memory_bytes=_kv_bytes(spec),
            generation_config="vllm",
            skip_tokenizer_init=True,
            distributed_executor_backend="uni",
            disable_log_stats=True,
            seed=0,
        ).llm_engine
        self._runs = 0

    def run(self, requests: Sequence[TimedRequest], num_slots: int | None = None) -> Timeline:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._runs += 1
        prefix = f"{self._runs}-"

        def submit(index: int, request: TimedRequest) -> None:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            self._engine.add_request(f"{prefix}{index}", prompt, params)

        def step() -> Mapping[int, Sequence[int]]:
            return {
                int(output.request_id.removeprefix(prefix)): list(output.outputs[0].token_ids)
                for output in self._engine.step()
            }

        return drive(requests, submit, step, self._engine.has_unfinished_requests)


class Transformers(System):
    """transformers' ``generate``: a batch of equal prompts at a time. A request that arrives during a batch waits for
    its end."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(spec.threads)
        dtype = getattr(torch, spec.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            spec.checkpoint, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        # Defaults of the checkpoint (sampling, EOS) must not fill the gaps of the one given to `generate`.
        self._model.generation_config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)

    def run(self, requests: Sequence[TimedRequest], num_slots: int | None = None) -> Timeline:
        timeline = Timeline.empty(len(requests))
        start = time.perf_counter()
        for arrival in sorted({request.arrival_s for request in requests}):
            batch = [index for index, request in enumerate(requests) if request.arrival_s == arrival]
            time.sleep(max(0.0, arrival - (time.perf_counter() - start)))
            self._generate(batch, requests, timeline, start)
        timeline.check_complete(requests)
        return timeline

    def _generate(
        self, batch: list[int], requests: Sequence[TimedRequest], timeline: Timeline, start: float
    ) -> None:
        import torch
        from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

        shapes = {(len(requests[i].prompt_token_ids), requests[i].max_tokens) for i in batch}
        if len(shapes) != 1:
            raise ValueError(f"prompts of one batch must be equally long, got {sorted(shapes)}")
        ((prompt_tokens, max_tokens),) = shapes
        ends: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                ends.append(time.perf_counter() - start)
                return torch.zeros(len(input_ids), dtype=torch.bool)

        input_ids = torch.tensor([requests[i].prompt_token_ids for i in batch])
        config = GenerationConfig(
            do_sample=False, use_cache=True, pad_token_id=0, max_new_tokens=max_tokens, max_length=None
        )
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        for column, end in enumerate(ends):
            tokens = output[:, prompt_tokens + column].tolist()
            timeline.record(end, {index: [token] for index, token in zip(batch, tokens, strict=True)})


def load_system(spec: WorkerSpec) -> System:
    if spec.system == "blockserve":
        return Blockserve(spec)
    if spec.system == "transformers":
        return Transformers(spec)
    return Vllm(spec, eager=spec.system == "vllm-eager")


def _kv_bytes(spec: WorkerSpec) -> int:
    """Room for every request at its longest, like our slots, and a page per request to spare."""
    config = json.loads((Path(spec.checkpoint) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    element = 4 if spec.dtype == "float32" else 2
    per_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim * element
    return spec.max_num_seqs * (spec.max_model_len + PAGE_TOKENS) * per_token
