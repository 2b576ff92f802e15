"""The decoder, its tokenizer and its weights: training, scoring and cached sampling on one code path."""

from lemon_jax.model.config import PRESETS, DecoderConfig
from lemon_jax.model.decoder import Decoder, KVCache
from lemon_jax.model.layout import attention_mask, rope_positions
from lemon_jax.model.pretrained import load_pretrained
from lemon_jax.model.sampling import Samples, sample
from lemon_jax.model.scoring import completion_log_probs
from lemon_jax.model.text_tokenizer import TextTokenizer, TokenIds
from lemon_jax.model.tokenizer import Tokenizer, covering_tokens, train_tokenizer
from lemon_jax.model.weights import load_weights, named_params, params_sha256, read_metadata, save_weights

__all__ = [
    "PRESETS",
    "Decoder",
    "DecoderConfig",
    "KVCache",
    "Samples",
    "TextTokenizer",
    "TokenIds",
    "Tokenizer",
    "attention_mask",
    "completion_log_probs",
    "covering_tokens",
    "load_pretrained",
    "load_weights",
    "named_params",
    "params_sha256",
    "read_metadata",
    "rope_positions",
    "sample",
    "save_weights",
    "train_tokenizer",
]
