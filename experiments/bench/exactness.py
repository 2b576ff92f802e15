"""How exactly the decoder computes what real model files say: beside transformers, and beside llama.cpp.

python experiments/bench/exactness.py --gguf MODEL.gguf [MORE.gguf ...]

Each file is read, dequantised, and saved in the hub's layout. Two figures come of it:

1. The largest difference between a logit here and in transformers (fp32, the saved folder), over all
   positions of 20 prompts with their continuations and the whole vocabulary. It must not exceed 1e-3.
2. llama.cpp continues the prompts greedily by 64 tokens, from the GGUF file itself. The share of its tokens
   that are the likeliest here too, given the same tokens before them, must be at least 96 %. A correct
   decoder stays below 100 %: llama.cpp rounds activations to 8 bits, so near ties fall otherwise.

With --double transformers also computes in fp64, which tells how far its own fp32 logits are from the exact
ones: where activations are huge, both round. And once more in fp64, where the output of every module alone is
rounded to fp32: no fp32 implementation can be expected to come closer than that to the exact logits.

Needs the extra `reference`, disk space for the fp32 parameters, and memory for them twice at most.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np

from lemon_jax.backends.embedded import EmbeddedServer
from lemon_jax.errors import LemonError
from lemon_jax.model import Decoder, attention_mask, load_pretrained, rope_positions
from lemon_jax.model.hub_save import save_pretrained

LIMIT, AGREEMENT = 1e-3, 0.96
SLOTS = 128  # of a prompt with its continuation
PACKAGES = ("lemon-jax", "jax", "flax", "gguf", "transformers", "torch", "xllamacpp")
PROMPTS = (
    "def fibonacci(n):\n    ",
    "The capital of France is",
    "Question: A baker sells 14 loaves in the morning and twice as many later. How many is that?\nAnswer:",
    "import numpy as np\n\ndef normalise(x):\n    \"\"\"Scale x to unit length.\"\"\"\n",
    "Once upon a time, in a village by the sea, there lived",
    "Translate to German: The weather is fine today.\nGerman:",
    "A list of five fruits:\n1.",
    "The three laws of motion, in plain words, are these. First,",
    "class Stack:\n    def __init__(self):\n",
    "Explain why the sky is blue. The sky is blue because",
    "SELECT name, COUNT(*) FROM orders",
    "To make tea, first boil the water. Then",
    "If 3x + 5 = 20, then x is",
    "Dear Ms Miller,\n\nthank you for your letter of last week.",
    "{\"name\": \"Ada\", \"born\": 1815, \"occupation\":",
    "The difference between a list and a tuple in Python is that",
    "In 1969, the first people to walk on the Moon",
    "<html>\n  <head>\n    <title>",
    "Photosynthesis is the process by which plants",
    "for i in range(10):\n    if i % 2 == 0:\n        ",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gguf", nargs="+", required=True, type=Path, metavar="FILE", help="model files")
    add("--prompts", type=int, default=len(PROMPTS), help=f"how many of the {len(PROMPTS)} prompts (all)")
    add("--tokens", type=int, default=64, help="tokens llama.cpp adds to each (64)")
    add("--double", action="store_true", help="also compare both with fp64 (off)")
    add("--threads", type=int, default=None, help="of llama.cpp (the cores this process may use)")
    args = parser.parse_args()
    versions = (f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"machine: {processor()}, {os.cpu_count()} cores; Python {platform.python_version()}")
    print(f"versions: {', '.join(versions)}")
    print(f"{args.prompts} prompts, {args.tokens} greedy tokens of llama.cpp each; fp32\n", flush=True)
    try:
        passed = [check(path, args) for path in args.gguf]
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"verdict: {sum(passed)} of {len(passed)} files pass")
    return 0 if all(passed) else 1


def check(path: Path, args: argparse.Namespace) -> bool:
    """Print both figures of one file, and whether they pass."""
    print(f"{path.name}: {path.stat().st_size} bytes, SHA-256 {sha256(path)}")
    rows = asyncio.run(continued(path, PROMPTS[: args.prompts], args.tokens, args.threads))
    sequences = [prompt + answer for prompt, answer in rows]
    begun = time.monotonic()
    decoder, config = load_pretrained(path)
    count = sum(x.size for x in jax.tree.leaves(decoder))
    print(f"  {count / 1e6:.0f} M parameters, read in {time.monotonic() - begun:.0f} s")
    with tempfile.TemporaryDirectory(prefix="lemon-exactness-") as folder:
        save_pretrained(Path(folder) / "hub", decoder, config, max_positions=SLOTS)
        ours = [logits(decoder, tokens) for tokens in sequences]
        del decoder  # the reference needs the room
        gc.collect()
        theirs = reference(Path(folder) / "hub", sequences, double=False)
        exact = reference(Path(folder) / "hub", sequences, double=True) if args.double else []
        rounded = reference(Path(folder) / "hub", sequences, double=True, rounded=True) if exact else []
    pairs = [
        (int(token), int(np.argmax(row[len(prompt) - 1 + i])))
        for (prompt, answer), row in zip(rows, ours, strict=True)
        for i, token in enumerate(answer)
    ]
    agree = sum(theirs == here for theirs, here in pairs)
    share = agree / len(pairs)
    by_position = differences(ours, theirs)
    largest, above = by_position.max(), int((by_position > LIMIT).sum())
    span = max(map(np.ptp, theirs))
    close, same = bool(largest <= LIMIT), share >= AGREEMENT
    print(
        f"  transformers: largest logit difference {largest:.2e} over {len(by_position)} positions x "
        f"{config.vocab_size} tokens, logits spanning {span:.0f}; at most {LIMIT:g}: {verdict(close)} "
        f"({above} positions above)"
    )
    if exact:
        print(
            f"  fp64: largest difference of ours {differences(ours, exact).max():.2e}, "
            f"of transformers' fp32 {differences(theirs, exact).max():.2e}, of fp64 with the outputs of all "
            f"modules rounded to fp32 {differences(rounded, exact).max():.2e}"
        )
        for at in np.flatnonzero(by_position > LIMIT):
            three = (differences(some, exact)[at] for some in (ours, theirs, rounded))
            print("  position {}: {:.2e}, {:.2e}, {:.2e}".format(at, *three))
    print(
        f"  llama.cpp: {agree} of {len(pairs)} next tokens agree ({100 * share:.1f} %); "
        f"at least {100 * AGREEMENT:g} %: {verdict(same)}\n",
        flush=True,
    )
    return close and same


def verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def differences(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """At every position of all sequences, the largest absolute difference of a logit."""
    return np.concatenate([np.abs(a - b).max(axis=-1) for a, b in zip(ones, others, strict=True)])


def reference(
    folder: Path, sequences: Sequence[list[int]], *, double: bool, rounded: bool = False
) -> list[np.ndarray]:
    """Logits [T, V] of each sequence by transformers, computed in fp32 or fp64; with `rounded` every module's
    output is rounded to fp32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.float64 if double else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if rounded:
        for module in model.modules():
            module.register_forward_hook(
                lambda _module, _inputs, out: out.float().to(dtype) if torch.is_tensor(out) else out
            )
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in sequences]


@jax.jit
def _logits(decoder: Decoder, tokens_T: jax.Array) -> jax.Array:
    slots = tokens_T.shape[0]
    lengths, index = jnp.array([slots]), jnp.arange(slots)
    hidden, _ = decoder(
        tokens_T[None], rope_positions(lengths, index, slots), attention_mask(lengths, index, slots, slots)
    )
    return decoder.logits(hidden)[0]


def logits(decoder: Decoder, tokens: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of a sequence; padded behind, which changes nothing before, to compile once."""
    padded = np.zeros(SLOTS, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(decoder, jnp.asarray(padded)))[: len(tokens)]


async def continued(
    path: Path, prompts: Sequence[str], tokens: int, threads: int | None
) -> list[tuple[list[int], list[int]]]:
    """(ids of the prompt, ids that llama.cpp adds greedily), both by llama.cpp's own tokenizer."""
    out = []
    async with (
        EmbeddedServer(path, slots=1, context=2 * SLOTS, threads=threads) as server,
        httpx.AsyncClient(
            base_url=server.base_url.removesuffix("/v1"),
            headers={"Authorization": f"Bearer {server.api_key}"},
            timeout=600,
            trust_env=False,
        ) as client,
    ):
        for prompt in prompts:
            ids = await post(client, "/tokenize", {"content": prompt, "add_special": True})
            body = {"prompt": ids["tokens"], "n_predict": min(tokens, SLOTS - len(ids["tokens"]))}
            settings = {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}
            answer = await post(client, "/completion", body | settings)
            out.append((list(ids["tokens"]), list(answer["tokens"])))
    return out


async def post(client: httpx.AsyncClient, path: str, body: dict) -> dict:
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        raise LemonError(f"llama.cpp: {path} gives {reply.status_code} {reply.text[:200]!r}")
    return reply.json()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    sys.exit(main())
