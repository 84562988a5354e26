"""`demo://` names, and the shipped llada2-words checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from replicas.demo import DEMO_MODELS, resolve_model_path, smollm2
from replicas.demo.llada2_module import load_module
from replicas.demo.tasks import KINDS
from replicas.demo.train_llada2 import CONFIG, MAX_POSITIONS, config_json
from replicas.demo.words_decode import evaluate
from replicas.demo.words_tokenizer import EOS_ID, encode_chat, write_tokenizer

SHIPPED = resolve_model_path("demo://llada2-words")
REPOSITORY = Path(__file__).parents[3]


def test_names_resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(smollm2, "ensure_smollm2", lambda cache: asked.append(cache) or tmp_path)
    assert SHIPPED == REPOSITORY / "replicas" / "demo" / "llada2_words"
    assert resolve_model_path("demo://smollm2-135m-instruct") == tmp_path
    assert resolve_model_path("demo://smollm2-135m-instruct", cache_dir="/c") == tmp_path
    assert asked == [None, Path("/c")]


@pytest.mark.parametrize("path", ["models/mine", "/abs/folder", "inclusionAI/LLaDA2.0-mini"])
def test_other_paths_pass_through(path: str) -> None:
    assert resolve_model_path(path) == Path(path)


@pytest.mark.parametrize("path", ["demo://", "demo://llada2", "demo://../llada2_words"])
def test_unknown_demo_name_lists_the_known_ones(path: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_model_path(path)
    assert repr(path) in str(caught.value)
    assert all(f"demo://{name}" in str(caught.value) for name in DEMO_MODELS)


@pytest.mark.parametrize("module", ["replicas.demo", "replicas.demo.tasks", "replicas.demo.smollm2"])
def test_import_is_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'gguf'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stdout.strip() == "[]"


def test_shipped_files_are_those_of_the_training_code(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, MAX_POSITIONS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((SHIPPED / name).read_text()) == json.loads((tmp_path / name).read_text())
    assert json.loads((SHIPPED / "config.json").read_text()) == config_json(CONFIG, "bfloat16")
    assert json.loads((SHIPPED / "generation_config.json").read_text())["eos_token_id"] == EOS_ID
    assert (SHIPPED / "README.md").is_file()


def test_shipped_tokenizer_and_size() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    chat = [{"role": "user", "content": "reverse: hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer(text)["input_ids"] == encode_chat(chat)
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 8 << 20


def test_shipped_experts_are_all_used() -> None:
    tensors = load_file(SHIPPED / "model.safetensors")
    biases = [t for name, t in tensors.items() if name.endswith("expert_bias")]
    assert len(biases) == CONFIG.num_hidden_layers - CONFIG.first_k_dense_replace
    assert all(len(set(bias.tolist())) > 1 for bias in biases)


def test_shipped_model_answers_unseen_prompts() -> None:
    scores = evaluate(load_module(SHIPPED), count=40, seed=77, progress=False)
    assert scores["all"].asked == 40
    assert scores["all"].accuracy >= 0.9, scores["all"].wrong
    assert scores["all"].tokens_per_forward >= 2
    assert sum(scores[kind].asked for kind in KINDS) == 40
