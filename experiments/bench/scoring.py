"""Log-probabilities over a vocabulary of 151,936, 8 x 512 tokens: in chunks, beside logits held whole.

python experiments/bench/scoring.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from side_by_side import in_turn, machine, median, spread, versions

from lemon_jax.model import Decoder, DecoderConfig, completion_log_probs
from lemon_jax.model.scoring import completion_hidden, token_log_probs

ROWS, PROMPT, COMPLETION = 8, 32, 512
CONFIG = DecoderConfig(  # the head of Qwen2.5-0.5B on a body of one layer: the head is what is measured
    vocab_size=151_936, embed_dim=896, num_layers=1, num_heads=14, num_kv_heads=2, head_dim=64, mlp_dim=896
)


def held_whole(decoder: Decoder, prompts: Array, lengths: Array, completions: Array, _: Array) -> Array:
    hidden = completion_hidden(decoder, prompts, lengths, completions)
    return token_log_probs(decoder.logits(hidden), completions, 1.0)[0]


def in_chunks(decoder: Decoder, prompts: Array, lengths: Array, completions: Array, counts: Array) -> Array:
    return completion_log_probs(decoder, prompts, lengths, completions, counts, chunk=32)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    given = (
        decoder,
        rng.integers(0, CONFIG.vocab_size, (ROWS, PROMPT)).astype(np.int32),
        np.full(ROWS, PROMPT, np.int32),
        rng.integers(0, CONFIG.vocab_size, (ROWS, COMPLETION)).astype(np.int32),
        np.full(ROWS, COMPLETION, np.int32),
    )
    print(machine())
    print(versions("jax", "flax"))
    print(f"{ROWS} x {COMPLETION} tokens, vocabulary {CONFIG.vocab_size:,}, width {CONFIG.embed_dim}, fp32")
    for direction in ("forward", "forward and backward"):
        compiled, temporary = {}, {}
        for name, function in (("in chunks", in_chunks), ("held whole", held_whole)):
            compiled[name], temporary[name] = compile_for(function, given, backward=direction != "forward")
        seconds = in_turn(compiled, args.rounds)
        for name, times in seconds.items():
            print(f"{direction}, {name}: {spread(times)}, {temporary[name] / 2**20:,.0f} MiB of temporaries")
        memory = temporary["held whole"] / temporary["in chunks"]
        time = median(seconds["held whole"]) / median(seconds["in chunks"])
        print(f"{direction}: memory 1/{memory:.1f} (target 1/8), {time:.2f} x as fast (target 1.0)")


def compile_for(
    function: Callable[..., Array], given: tuple[object, ...], *, backward: bool
) -> tuple[Callable[[], object], int]:
    """The compiled function, and the bytes that XLA sets aside for its temporaries."""

    def total(decoder: Decoder, *rest: Array) -> Array:
        return jnp.sum(function(decoder, *rest))

    compiled = jax.jit(jax.grad(total) if backward else function).lower(*given).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None  # the CPU's and the accelerators' compilers give one
    return lambda: jax.block_until_ready(compiled(*given)), analysis.temp_size_in_bytes


if __name__ == "__main__":
    main()
