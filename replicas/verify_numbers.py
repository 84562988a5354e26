"""Forwards, router choices and sampling filters against reference data (tests/golden/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from replicas.attention.kv_cache import KVCache
from replicas.attention.metadata import CommonAttentionMetadata
from replicas.attention.virtual_batch import make_block_causal_virtual_batches
from replicas.decoding.sampling import filtered_probs, greedy
from replicas.model_info import ModelInfo
from replicas.models.decoder import DecoderModel
from replicas.models.moe import MoE, Routing
from replicas.models.registry import load_model

#: Absolute for float32, else times the spread of the reference's values (the README's figures; it gives none
#: for float16, which rounds finer than bfloat16).
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
PROBABILITY_TOLERANCE = 1e-5
#: Share of the router's choices that may fall otherwise in a lower precision; a wrong router changes nearly all.
MAX_OTHER_EXPERTS = 0.25


@dataclass
class FileReport:
    """Outcome of one reference file.

    ``cases`` were compared; ``not_comparable`` maps a reason to the number of cases that were not.
    """

    name: str
    cases: int = 0
    worst: float | None = None
    mismatches: list[str] = field(default_factory=list)
    not_comparable: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, what: str, ok: bool) -> None:
        self.cases += 1
        if not ok:
            self.mismatches.append(what)

    def check_error(self, what: str, error: float, tolerance: float) -> None:
        # np.maximum keeps a NaN, and NaN is not within any tolerance.
        self.worst = float(np.maximum(self.worst or 0.0, error))
        self.check(f"{what}: error {error:.2e} > {tolerance:.2e}", error <= tolerance)

    def skip(self, reason: str, count: int = 1) -> None:
        if count:
            self.not_comparable[reason] = self.not_comparable.get(reason, 0) + count

    def line(self) -> str:
        parts = [f"{self.name}: {self.cases - len(self.mismatches)}/{self.cases} equal"]
        if self.worst is not None:
            parts.append(f"largest error {self.worst:.1e}")
        parts += [f"{count} not comparable ({reason})" for reason, count in self.not_comparable.items()]
        return ", ".join(parts + self.notes)


def verify_forwards(report: FileReport, model: DecoderModel, info: ModelInfo, file: Path, dtype: str) -> None:
    """Logits of whole sequences and of the last block of canvases; hidden states in float32.

    In a lower precision a router's near ties fall the other way, here as in any implementation, and one other
    expert changes a whole row. Those choices are decisions, not arithmetic: they are taken from the float32
    model (whose choices router.npz checks), and the differing ones are counted in the report.
    """
    data = _read(file)
    replay = None
    if dtype != "float32" and _moe_layers(model):
        reference = load_model(info, dtype=torch.float32, device=model.device, progress=False)
        replay = ExpertReplay(model, reference, info)
    for name in _names(data, "_ids"):
        token_ids = data[f"{name}_ids"]
        if replay is None:
            logits, hidden = forward_sequence(model, info, token_ids)
        else:
            logits, hidden = replay.forward_sequence(token_ids)
        if f"{name}_logits" in data:
            expected = data[f"{name}_logits"]
            rows = data[f"{name}_logits_rows"] if f"{name}_logits_rows" in data else slice(None)
            got = logits[rows]
        else:
            expected = data[f"{name}_lastblock_logits"]
            got = logits[-len(expected) :]
        report.check_error(name, largest_error(got, expected), _tolerance(expected, dtype))
        if f"hidden_for_{name}" in data and dtype == "float32":
            error = largest_error(np.stack(hidden), data[f"hidden_for_{name}"])
            report.check_error(f"hidden states of {name}", error, TOLERANCE[dtype])
    if replay is not None:
        other = f"{dtype} itself would choose others in {replay.num_other} of {replay.num_choices} choices"
        report.check(other, replay.num_other <= MAX_OTHER_EXPERTS * replay.num_choices)
        report.notes.append(f"experts as float32 chooses them ({other})")


def forward_sequence(
    model: DecoderModel, info: ModelInfo, token_ids: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [tokens, V] and hidden states (embeddings, then each layer's output) of one sequence in one
    forward, under the model's own mask."""
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    count = len(tokens)
    starts = torch.tensor([0, count], dtype=torch.int32)
    metadata = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts[1:],
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(count),
    )
    if info.block_length is not None:
        metadata = make_block_causal_virtual_batches(metadata, info.block_length)
    states: list[torch.Tensor] = []
    kv_cache = KVCache.allocate(model, 1, info.max_model_len)
    hidden = model.forward(tokens, torch.arange(count), kv_cache, metadata, hidden_states=states)
    return model.compute_logits(hidden).numpy(), [state.float().numpy() for state in states]


class ExpertReplay:
    """Runs ``model`` with the experts that ``reference`` chooses for the same tokens.

    ``num_choices``: tokens times MoE layers so far; ``num_other``: those for which ``model`` itself would have
    taken another set of experts.
    """

    def __init__(self, model: DecoderModel, reference: DecoderModel, info: ModelInfo) -> None:
        self._model, self._reference, self._info = model, reference, info
        self.num_choices = 0
        self.num_other = 0

    def forward_sequence(self, token_ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        chosen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def recording(routing: Routing) -> Routing:
            def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                chosen.append(routing(logits))
                return chosen[-1]

            return route

        def replaying(routing: Routing) -> Routing:
            def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                ids, weights = chosen.pop(0)
                own = routing(logits)[0].sort(dim=-1).values
                self.num_choices += len(ids)
                self.num_other += int((own != ids.sort(dim=-1).values).any(dim=-1).sum())
                return ids, weights

            return route

        with _routing(self._reference, recording):
            forward_sequence(self._reference, self._info, token_ids)
        with _routing(self._model, replaying):
            return forward_sequence(self._model, self._info, token_ids)


def verify_routers(report: FileReport, model: DecoderModel, file: Path, dtype: str) -> None:
    """Expert ids as sets, their weights, and the output of each MoE layer; the output alone below float32,
    since rounding the input decides near ties the other way."""
    data = _read(file)
    for name in _names(data, "_x"):
        moe = model.layers[int(name.removeprefix("layer"))].mlp
        if not isinstance(moe, MoE):
            report.check(f"{name}: is not a mixture of experts here", False)
            continue
        x = torch.from_numpy(data[f"{name}_x"]).to(model.dtype).flatten(0, -2)
        if dtype == "float32":
            ids, weights = (part.numpy() for part in moe.route(x))
            expected_ids = data[f"{name}_topk_ids"].reshape(len(x), -1)
            expected_weights = data[f"{name}_topk_weights"].reshape(len(x), -1)
            same = np.array_equal(np.sort(ids, axis=-1), np.sort(expected_ids, axis=-1))
            report.check(f"{name}: other experts than the reference's", same)
            if same:
                error = largest_error(_by_expert(ids, weights), _by_expert(expected_ids, expected_weights))
                report.check_error(f"{name} weights", error, TOLERANCE[dtype])
        else:
            report.skip("expert ids in a lower precision")
        expected = data[f"{name}_moe_out"].reshape(len(x), -1)
        error = largest_error(moe(x).float().numpy(), expected)
        report.check_error(f"{name} output", error, _tolerance(expected, dtype))


def verify_filters(report: FileReport, file: Path) -> None:
    """Distributions after temperature, top-k and top-p; greedy tokens and confidences. Always float32."""
    data = _read(file)
    logits = torch.from_numpy(data["logits"])
    rows = len(logits)
    for j, (temperature, top_k, top_p) in enumerate(data["grid_temperature_topk_topp"].tolist()):
        probs = filtered_probs(
            logits.clone(),
            torch.full((rows,), temperature),
            torch.full((rows,), int(top_k)),
            torch.full((rows,), top_p),
        )
        report.check_error(
            f"probs{j}", largest_error(probs.numpy(), data[f"probs{j}"]), PROBABILITY_TOLERANCE
        )
    tokens, confidence = greedy(logits.clone())
    report.check("greedy tokens differ", tokens.tolist() == data["greedy_tokens"].tolist())
    error = largest_error(confidence.numpy(), data["greedy_conf"])
    report.check_error("greedy confidence", error, PROBABILITY_TOLERANCE)


def largest_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Raises ``ValueError`` for different shapes; NaN if there is one."""
    if got.shape != expected.shape:
        raise ValueError(f"shape {got.shape}, the reference has {expected.shape}")
    return float(np.abs(got.astype(np.float64) - expected).max())


def _read(file: Path) -> np.lib.npyio.NpzFile:
    try:
        return np.load(file)
    except (ValueError, EOFError, BadZipFile) as error:
        # numpy's own message for anything that is no archive recommends to unpickle it.
        raise ValueError("not a readable .npz file (truncated?)") from error


def _tolerance(expected: np.ndarray, dtype: str) -> float:
    return TOLERANCE[dtype] * (1.0 if dtype == "float32" else float(np.ptp(expected)))


def _names(data: np.lib.npyio.NpzFile, suffix: str) -> list[str]:
    names = [key.removesuffix(suffix) for key in data.files if key.endswith(suffix)]
    if not names:
        raise ValueError(f"holds no array named *{suffix}")
    return names


def _by_expert(ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``weights`` [tokens, k] in the order of the expert ids."""
    return np.take_along_axis(weights, np.argsort(ids, axis=-1), axis=-1)


def _moe_layers(model: DecoderModel) -> list[MoE]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]


@contextmanager
def _routing(model: DecoderModel, wrap: Callable[[Routing], Routing]) -> Iterator[None]:
    """Wraps the routing of every MoE layer for a while."""
    originals = [(moe, moe.routing) for moe in _moe_layers(model)]
    for moe, routing in originals:
        moe.routing = wrap(routing)
    try:
        yield
    finally:
        for moe, routing in originals:
            moe.routing = routing
