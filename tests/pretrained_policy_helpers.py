"""A tiny model of the Qwen2 family in a hub folder, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flax import nnx
from policy_helpers import CHOICES, LEARNED, TASKS, teacher_specs
from small_tokenizers import tokenizer_json, write_tokenizer

from lemon_jax.model import PRESETS, Decoder
from lemon_jax.model.hub_save import save_pretrained
from lemon_jax.spec import dump, explain

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPARE_ROWS = 5  # of the embedding: models have more rows than their tokenizer has tokens


def spec_tokenizer() -> str:
    """A tokenizer.json that writes specs, and what explains them, in few tokens."""
    texts = [*(t.prompt() for t in [*TASKS, *CHOICES]), *teacher_specs(60), *map(dump, LEARNED * 20)]
    return tokenizer_json("qwen", 900, (*texts, *[explain()] * 20))


def write_hub_model(folder: Path, *, template: str | None = CHATML, seed: int = 0) -> Path:
    """The folder, filled."""
    source = spec_tokenizer()
    config = replace(PRESETS["tiny"], vocab_size=904 + SPARE_ROWS, qkv_bias=True, rope_theta=1e6)
    decoder = Decoder(config, rngs=nnx.Rngs(seed))
    save_pretrained(folder, decoder, config, max_positions=2048)
    write_tokenizer(folder, source, template)
    return folder
