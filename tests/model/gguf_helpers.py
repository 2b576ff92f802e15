"""GGUF files of transformers models, as llama.cpp's converter writes them."""

import gguf
import numpy as np
from gguf_files import add_shape, gguf_writer
from pretrained_helpers import torch

QUANTISED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # what the package can write
# Of the other kinds random blocks are made, with 16-bit scales at these bytes.
SCALES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


def blocks(shape, kind, rng):
    """Random quantised rows of a matrix of this shape, of finite values below 2."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.uniform(1e-3, 2e-3, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_gguf(path, model, kind="F32"):
    """Write `model`'s parameters, matrices quantised to `kind`; the model then holds what the file says."""
    config, rng = model.config, np.random.default_rng(0)
    family = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    quantisation = gguf.GGMLQuantizationType[kind]
    with gguf_writer(path, family) as writer:
        _keys(writer, config)
        for name, parameter in model.named_parameters():
            array = parameter.detach().numpy()
            there = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if array.ndim == 1:
                offset = 1.0 if family == "gemma3" else 0.0
                writer.add_tensor(there, array + np.float32(offset))
                continue
            data = gguf.quantize(array, quantisation) if kind in QUANTISED else blocks(array.shape, kind, rng)
            parameter.data = torch.tensor(gguf.dequantize(data, quantisation))
            if family == "llama" and ("q_proj" in name or "k_proj" in name):
                heads = config.num_attention_heads if "q_" in name else config.num_key_value_heads
                data = pair_rows(data, heads)
            writer.add_tensor(there, data, raw_dtype=None if kind in ("F32", "F16") else quantisation)
        if config.rope_parameters.get("rope_type") == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_divisors(model))


def pair_rows(rows, heads):
    """As the converter permutes queries and keys: the halves of a head come to alternate."""
    return np.concatenate(
        [np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in np.split(rows, heads)]
    )


def llama3_divisors(model):
    rotary = model.model.rotary_emb
    plain = model.config.rope_parameters["rope_theta"] ** (
        -np.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
    )
    return (plain / rotary.inv_freq.numpy()).astype(np.float32)


def _keys(writer, config):
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    add_shape(
        writer,
        layers=config.num_hidden_layers,
        context=config.max_position_embeddings,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
    )
    if config.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bool("general.nothing", True)
    writer.add_array("general.numbers", [1.5, 2.5])
