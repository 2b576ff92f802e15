"""How often the workers on JAX, with bfloat16 weights, prefer the same next token as with fp32 weights.

    python experiments/bench/agreement.py --model MODEL.gguf

Feeds chats of made-up problems, in 16 slots, token by token through the compiled decoding step in both
types, the same tokens each time, and compares the likeliest next token at every position. The target is 98 %.
Needs memory for the fp32 parameters (2.5 GB for the 0.5B model); about a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from lemon_jax.backends import Message
from lemon_jax.backends.jax_model import chat_ids
from lemon_jax.bench.sample import generate
from lemon_jax.model.pretrained_text import load_pretrained_text
from lemon_jax.model.serving import ServingEngine, ServingShape
from lemon_jax.model.serving_weights import WeightType, load_serving_weights, open_source
from lemon_jax.runtime.prompts import fixed_prefix

SLOTS = 16
TARGET = 0.98


def chats(model: Path, vocab_size: int, length: int) -> np.ndarray:
    """The first `length` tokens of as many chats as there are slots [slots, length]."""
    text = load_pretrained_text(model, vocab_size)
    if text.template is None:
        raise SystemExit(f"{model}: has no chat template; name a model that was taught to chat")
    rows: list[list[int]] = []
    for task in generate("number", 8 * SLOTS, 0):
        system = fixed_prefix("math_solver" if len(rows) % 2 else "inspector") + "Solve the problem."
        question = Message(role="user", content=f"{task.question}\n" * 4)
        ids = chat_ids(text.tokenizer, text.template, [Message(role="system", content=system), question])
        if len(ids) >= length and len(rows) < SLOTS:
            rows.append(ids[:length])
    return np.asarray(rows, np.int32)


def likeliest(model: Path, weights: WeightType, ids_SxT: np.ndarray) -> np.ndarray:
    """The likeliest token after each of these [slots, length], as the compiled step has it."""
    source = open_source(model)
    slots, length = ids_SxT.shape
    most = -(-length // 64)
    shape = ServingShape(slots=slots, context=64 * most, pages=slots * most + 1)
    engine = ServingEngine(load_serving_weights(source, weights), source.config, shape)
    table = np.arange(1, slots * most + 1, dtype=np.int32).reshape(slots, most)
    zeros, cold, seeds = np.zeros(slots, np.int32), np.zeros(slots, np.float32), np.zeros(slots, np.uint32)
    steps = [engine.decode(ids_SxT[:, at], zeros + at, table, cold, seeds, zeros) for at in range(length)]
    return np.stack(steps, axis=1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--length", type=int, default=200, help="tokens of each chat")
    options = parser.parse_args(argv)
    ids_SxT = chats(options.model, open_source(options.model).config.vocab_size, options.length)
    exact, rounded = (likeliest(options.model, kind, ids_SxT) for kind in ("float32", "bfloat16"))
    share = float((exact == rounded).mean())
    print(f"{options.model.name}: {share:.2%} of {exact.size} next tokens agree (target {TARGET:.0%})")
    return 0 if share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
