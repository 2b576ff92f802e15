"""One GRPO + counterfactual update of the compact policy, beside this machine's own matrix product.

python experiments/bench/update.py
python experiments/bench/update.py --torch        # and beside the same step in PyTorch
python experiments/bench/update.py --tunix        # and beside tunix's GRPO step (pip install google-tunix)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx
from side_by_side import in_turn, machine, matrix_product, median, spread, versions

from lemon_jax.model import PRESETS, Decoder, DecoderConfig
from lemon_jax.train.batch import UpdateBatch, micro_batches
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.update import init_state, update

ROLLOUTS, EDITS, PROMPT, COMPLETION = 24, 8, 128, 256  # 32 sequences of 384 tokens


def make_batch(config: DecoderConfig, seed: int = 0) -> UpdateBatch:
    """Full-length random rows: no padding makes the step look cheaper than it is."""
    rng = np.random.default_rng(seed)

    def ids(rows: int, slots: int) -> np.ndarray:
        return rng.integers(4, config.vocab_size, (rows, slots)).astype(np.int32)

    full = np.full
    return UpdateBatch(
        prompts_BxP=ids(ROLLOUTS, PROMPT),
        prompt_lengths_B=full(ROLLOUTS, PROMPT, np.int32),
        completions_BxC=ids(ROLLOUTS, COMPLETION),
        lengths_B=full(ROLLOUTS, COMPLETION, np.int32),
        old_log_probs_BxC=full((ROLLOUTS, COMPLETION), -np.log(config.vocab_size), np.float32),
        advantages_B=rng.standard_normal(ROLLOUTS).astype(np.float32),
        kept_B=full(ROLLOUTS, True),
        source_K=np.arange(EDITS, dtype=np.int32),
        first_K=full(EDITS, COMPLETION - 8, np.int32),
        last_K=full(EDITS, COMPLETION, np.int32),
        edited_completions_KxC=ids(EDITS, COMPLETION),
        edited_lengths_K=full(EDITS, COMPLETION, np.int32),
        contrast_K=rng.standard_normal(EDITS).astype(np.float32),
        weight_K=np.ones(EDITS, np.float32),
    )


def update_flops(config: DecoderConfig) -> float:
    """Multiply-adds count two. Matrix products only, each once: nothing that is recomputed counts.

    The policy passes forward and backward (3 x) over rollouts and edits, the reference forward over rollouts.
    Attention is counted causal: half of the square.
    """
    tokens = PROMPT + COMPLETION
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.embed_dim * (2 * heads + 2 * kv + 3 * config.mlp_dim)
    attention = heads * tokens  # scores and mixing: 2 products x heads x tokens / 2
    row = 2.0 * tokens * config.num_layers * (layer + attention)
    row += 2.0 * COMPLETION * config.embed_dim * config.vocab_size
    return row * (3 * (ROLLOUTS + EDITS) + ROLLOUTS)


def jax_step(config: DecoderConfig, settings: UpdateConfig, parts: int = 1) -> Callable[[], object]:
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    state = init_state(jax.tree.map(lambda x: x.copy(), params), settings)
    batch = make_batch(config)
    batch = micro_batches(batch, parts) if parts > 1 else batch
    held = [state]

    def step() -> object:
        held[0], metrics = update(held[0], params, batch, graph=graph, config=settings)
        return jax.block_until_ready(metrics)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="1,4,8", help="micro-batches that each side tries")
    parser.add_argument("--torch", action="store_true", help="also time the same step in PyTorch")
    parser.add_argument("--tunix", action="store_true", help="also time tunix's GRPO step, where it installs")
    args = parser.parse_args()
    config, settings = PRESETS["compact"], UpdateConfig()
    tried = [int(part) for part in args.parts.split(",")]
    product, product_flops = matrix_product()
    competitors = {"matrix product": product}
    competitors |= {f"update in {n} parts": jax_step(config, settings, n) for n in tried}
    if args.torch:
        import torch
        from torch_step import torch_step

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        competitors |= {
            f"torch in {n} parts": torch_step(config, settings, make_batch(config), n) for n in tried
        }
    if args.tunix:
        try:
            from tunix_step import tunix_step
        except ImportError as missing:
            print(f"tunix is left out: {missing}; pip install google-tunix")
            args.tunix = False
        else:
            competitors |= {
                f"tunix in {n} parts": tunix_step(config, settings, make_batch(config), n) for n in tried
            }
    print(machine())
    others = (["torch", "transformers"] if args.torch else []) + (["google-tunix"] if args.tunix else [])
    print(versions("jax", "flax", *others))
    print(f"compact policy, {ROLLOUTS} rollouts + {EDITS} edits of {PROMPT} + {COMPLETION} tokens, fp32")
    seconds = in_turn(competitors, args.rounds)
    for name, times in seconds.items():
        print(f"{name}: {spread(times)}")
    flops = update_flops(config)
    peak = product_flops / median(seconds["matrix product"])
    best = min(median(times) for name, times in seconds.items() if name.startswith("update"))
    print(f"matrix product 2048: {peak / 1e9:.0f} GFLOP/s; update: {flops / 1e9:.0f} GFLOP")
    print(f"update / matrix product: {flops / best / peak:.2f} (target 0.60)")
    for name, wanted, target in (("torch", args.torch, 2.0), ("tunix", args.tunix, 1.5)):
        if wanted:
            theirs = min(median(times) for rival, times in seconds.items() if rival.startswith(name))
            print(f"update against {name}, each at its best: {theirs / best:.2f} x (target {target})")


if __name__ == "__main__":
    main()
