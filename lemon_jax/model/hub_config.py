"""config.json of the hub's layout: read into a `DecoderConfig`, and written from one.

The keys and what they default to are those of transformers' configuration classes. `rope_parameters` is how
its version 5 writes what older files call `rope_theta`, `rope_local_base_freq` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemon_jax.errors import LemonError
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.config_values import ConfigValues
from lemon_jax.model.families import FAMILIES, Family, family_of

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu", "head_dim": 128},
    # The hub's Gemma files leave out much of what is the default.
    "gemma3": {
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What would change the numbers and is not computed here, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (False, None),
    "partial_rotary_factor": (1, 1.0, None),
}


def decoder_config(values: Mapping[str, Any], source: str) -> tuple[DecoderConfig, Family]:
    """The decoder that a config.json describes. Raises `LemonError` naming `source` and the key at fault."""
    if values.get("model_type") == "gemma3":  # with eyes: the decoder is a part of it
        text = ConfigValues(values, source).part("text_config")
        values = {"model_type": "gemma3_text"} | dict(text.values if text else {})
    family = next((f for f in FAMILIES.values() if f.model_type == values.get("model_type")), None)
    if family is None:
        known = ", ".join(f.model_type for f in FAMILIES.values())
        raise LemonError(
            f"{source}: model_type is {values.get('model_type')!r:.80}, expected one of {known}; "
            "use a model of these families"
        )
    given = {key: value for key, value in values.items() if value is not None}
    keys = ConfigValues(_DEFAULTS[family.name] | given, source)
    for key, harmless in _UNSUPPORTED.items():
        if keys.values.get(key) not in harmless:
            raise keys.fault(key, f"it to be absent, as in the models of the family {family.name}")
    fields = _shape(keys) | _rope(keys, family)
    if family.name == "gemma3":
        fields |= {
            "post_norms": True,
            "scale_embeddings": True,
            "query_pre_attn_scalar": keys.number("query_pre_attn_scalar"),
        }
    fields |= _sliding(keys, family, fields["num_layers"])
    try:
        return DecoderConfig(
            qkv_bias=family.name == "qwen2", qk_norm=family.name in ("qwen3", "gemma3"), **fields
        ), family
    except LemonError as error:
        raise LemonError(f"{source}: {error}") from error


def _shape(keys: ConfigValues) -> dict[str, Any]:
    activation = keys.text("hidden_activation" if keys.has("hidden_activation") else "hidden_act")
    if activation not in _ACTIVATIONS:
        raise LemonError(
            f"{keys.source}: the activation is {activation!r:.40}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    dim, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "embed_dim": dim,
        "num_layers": keys.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", dim // heads),
        "mlp_dim": keys.integer("intermediate_size"),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "activation": _ACTIVATIONS[activation],
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
    }


def _rope(keys: ConfigValues, family: Family) -> dict[str, Any]:
    """The rotary fields, from the new key or the old ones."""
    out: dict[str, Any] = {}
    rope = keys.part("rope_parameters")
    if family.name == "gemma3":
        local = rope.part("sliding_attention") if rope else None
        out["rope_local_theta"] = (local or keys).number(
            "rope_theta" if local else "rope_local_base_freq", 1e4
        )
        rope = (rope.part("full_attention") or rope) if rope else None
    out["rope_theta"] = (rope or keys).number("rope_theta", keys.number("rope_theta", 1e4))
    scaling = rope or keys.part("rope_scaling")
    if scaling is None:
        return out
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if scaling.values.get("partial_rotary_factor") not in _UNSUPPORTED["partial_rotary_factor"]:
        raise scaling.fault("partial_rotary_factor", "it to be absent: all of a head is rotated here")
    if kind == "default":
        return out
    if kind not in ("linear", "llama3"):
        raise LemonError(f"{scaling.source}: rope_type is {kind!r:.40}, expected default, linear or llama3")
    out |= {"rope_scaling": kind, "rope_factor": scaling.number("factor")}
    if kind == "llama3":
        out |= {
            "rope_low_freq_factor": scaling.number("low_freq_factor"),
            "rope_high_freq_factor": scaling.number("high_freq_factor"),
            "rope_original_context": scaling.integer("original_max_position_embeddings"),
        }
    return out


def _sliding(keys: ConfigValues, family: Family, num_layers: int) -> dict[str, Any]:
    """Which layers see a window only: from `layer_types`, or from the rule of the family."""
    if family.name == "llama" or (family.name != "gemma3" and not keys.flag("use_sliding_window", False)):
        return {}
    if num_layers > 10_000:
        raise keys.fault("num_hidden_layers", "at most 10000")
    if family.name == "gemma3":
        pattern = keys.integer("sliding_window_pattern")
        layers = [i for i in range(num_layers) if (i + 1) % pattern]
    else:
        first = keys.values.get("max_window_layers", 28)
        if type(first) is not int:
            raise keys.fault("max_window_layers", "a whole number")
        layers = list(range(min(max(first, 0), num_layers), num_layers))
    if keys.has("layer_types"):
        types = keys.values["layer_types"]
        kinds = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(t not in kinds for t in types):
            raise keys.fault("layer_types", f"a list of {num_layers} of {' and '.join(kinds)}")
        layers = [i for i, kind in enumerate(types) if kind == kinds[0]]
    if not layers:
        return {}
    return {"sliding_layers": tuple(layers), "sliding_window": keys.integer("sliding_window")}


def config_json(config: DecoderConfig, *, max_positions: int) -> dict[str, Any]:
    """The config.json of a decoder, as transformers 4.50 and later and vLLM read it.

    It says all in the old keys as well as in the new one, `rope_parameters`, since tools know one of the two.
    `max_positions` is the longest sequence in tokens. Raises `LemonError` for a decoder of no family.
    """
    family = family_of(config)
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": max_positions,
    }
    rope = _rope_json(config)
    if family.name != "gemma3":
        out |= {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_parameters": rope}
    else:
        local = config.rope_local_theta or config.rope_theta
        out |= {
            "hidden_activation": "gelu_pytorch_tanh",
            # transformers wants a whole number here
            "query_pre_attn_scalar": round(config.query_pre_attn_scalar or config.head_dim),
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": local,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
    if config.rope_scaling != "none":
        out["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    if config.sliding_layers or family.name == "gemma3":
        sliding = set(config.sliding_layers)
        out["layer_types"] = [
            "sliding_attention" if i in sliding else "full_attention" for i in range(config.num_layers)
        ]
        out["sliding_window"] = config.sliding_window or 4096  # Gemma's files name one even without a use
        if family.name != "gemma3":
            out["use_sliding_window"] = True
    return out


def _rope_json(config: DecoderConfig) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != "none":
        out |= {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        out |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context,
        }
    return out
