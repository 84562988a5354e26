"""Prompts, requests and faults of the tests of reused prefixes."""

from replicas.protocol import DiffusionParams

AR = "qwen3_dense_tied"
FAMILIES = ["llada2_b8", "llada2_b32", AR]
BLOCK = {"llada2_b8": 8, "llada2_b32": 32}
SYSTEM = [(7 * i * i + 3) % 290 + 5 for i in range(200)]


def question(i, length=9):
    return [(31 * i + 17 * j) % 290 + 5 for j in range(length)]


def diffusion_of(name, threshold=0.9):
    return DiffusionParams(threshold=threshold) if name.startswith("llada") else None


def reusable(name, common, given):
    """Tokens that may be reused of a common prefix."""
    return common // BLOCK[name] * BLOCK[name] if name in BLOCK else min(common, given - 1)


def ask(golden, name, prompts, max_tokens=20, first=0):
    return [
        golden.make(
            f"r{first + i}", prompt, max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion_of(name)
        )
        for i, prompt in enumerate(prompts)
    ]


def break_next_forward(core, chance):
    """Lets the next forward of a step fail, after it has written junk wherever it may write."""
    runner = core.engine.runner
    original = runner.forward

    def broken(rows, copies):
        runner.forward = original
        if chance.random() < 0.5:
            for source, target, num_tokens in copies:
                runner._kv_cache.copy_prefix(source, target, num_tokens)
        for slot, row in rows:
            for cache in (*runner._kv_cache.k, *runner._kv_cache.v):
                cache[slot, row.start : row.start + len(row.token_ids)] = 1e4
        # What it was to copy may be there or not, or half of it.
        for _, target, num_tokens in copies:
            if chance.random() < 0.5:
                for cache in (*runner._kv_cache.k, *runner._kv_cache.v):
                    cache[target, chance.randrange(num_tokens) :] = -1e4
        raise RuntimeError("broken on purpose")

    runner.forward = broken
