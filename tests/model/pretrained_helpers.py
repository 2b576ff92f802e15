"""Small random models of each family, written by transformers, which says what their logits are."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'reference' (torch, transformers) is not installed")
transformers = pytest.importorskip(
    "transformers", reason="the extra 'reference' (torch, transformers) is not installed"
)

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Windows are shorter than the tests' sequences, heads no hidden_size / num_heads where they may be.
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3Config", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2,
            "rope_parameters": _GEMMA_ROPE,
        },
    ),
}  # fmt: skip


def reference_model(name, *, scale=0.3, **sizes):
    """A model with large parameters: as initialised all are nearly uniform, and wrong ones nearly pass."""
    kind, changes = CONFIGS[name]
    config = getattr(transformers, kind)(**(_SIZES | changes | sizes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 or key.endswith("bias"):
            parameter.data.normal_(0, scale, generator=generator)
        else:  # a norm's scale: around 1, which Gemma stores as 0
            parameter.data.normal_(0.0 if name == "gemma3" else 1.0, 0.2, generator=generator)
    return model


def reference_logits(model, tokens):
    """Logits [T, V] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens, np.int64))[None]).logits[0].numpy()


def change_json(path, **changes):
    """Rewrite keys of a JSON file; None takes a key away."""
    values = json.loads(path.read_text())
    values |= changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
