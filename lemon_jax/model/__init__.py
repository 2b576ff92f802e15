"""The decoder, its tokenizer and its weights: training, scoring and cached sampling on one code path."""

from lemon_jax.model.automaton import Automaton, compile_automaton
from lemon_jax.model.config import PRESETS, DecoderConfig
from lemon_jax.model.constrained import sample_constrained
from lemon_jax.model.decoder import Decoder, KVCache
from lemon_jax.model.host_walk import Walk
from lemon_jax.model.layout import attention_mask, rope_positions
from lemon_jax.model.pretrained import load_pretrained
from lemon_jax.model.sampling import Samples, sample
from lemon_jax.model.sampling_parts import sample_in_parts
from lemon_jax.model.scoring import completion_log_probs
from lemon_jax.model.support import Constraint, Trace, trace
from lemon_jax.model.text_tokenizer import TextTokenizer, TokenIds
from lemon_jax.model.tokenizer import Tokenizer, covering_tokens, train_tokenizer
from lemon_jax.model.weights import (
    PACKED,
    load_weights,
    named_params,
    pack_weights,
    params_sha256,
    read_metadata,
    save_weights,
)

__all__ = [
    "PACKED",
    "PRESETS",
    "Automaton",
    "Constraint",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Samples",
    "TextTokenizer",
    "TokenIds",
    "Tokenizer",
    "Trace",
    "Walk",
    "attention_mask",
    "compile_automaton",
    "completion_log_probs",
    "covering_tokens",
    "load_pretrained",
    "load_weights",
    "named_params",
    "pack_weights",
    "params_sha256",
    "read_metadata",
    "rope_positions",
    "sample",
    "sample_constrained",
    "sample_in_parts",
    "save_weights",
    "trace",
    "train_tokenizer",
]
