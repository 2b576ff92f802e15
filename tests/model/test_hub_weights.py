"""Folders in the hub's layout, written by transformers: the same logits; and folders that are not sound."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import full_logits
from pretrained_helpers import (
    CONFIGS,
    VOCAB,
    change_json,
    reference_logits,
    reference_model,
    torch,
    transformers,
)

from lemon_jax.errors import LemonError
from lemon_jax.model import Decoder, load_pretrained, named_params, sample

TOLERANCE = 1e-4  # of fp32 logits that span about 10
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: (folder, model)}, each written once."""
    out = {}
    for name in CONFIGS:
        model = reference_model(name)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size="20KB" if name in ("llama3", "gemma3") else "1GB")
        out[name] = folder, model
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name, folders):
    folder, model = folders[name]
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (name in ("llama3", "gemma3"))
    decoder, _ = load_pretrained(folder)
    expected = reference_logits(model, TOKENS)
    assert np.ptp(expected) > 5
    np.testing.assert_allclose(full_logits(decoder, TOKENS), expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma3", "llama3"])
def test_cached_sampling_equals_transformers(name, folders):
    """Uneven prompts with padding between prompt and completion: a window must count tokens, not slots."""
    folder, model = folders[name]
    decoder, _ = load_pretrained(folder)
    lengths = [9, 4]
    prompts = jnp.asarray(np.stack([TOKENS[:12], TOKENS[5:17]]), jnp.int32)
    samples = jax.device_get(
        sample(
            decoder, prompts, jnp.asarray(lengths), jax.random.key(0),
            group=1, max_new=8, temperature=0.0, eos_ids=(-1,),
        )
    )  # fmt: skip
    for row, length in enumerate(lengths):
        tokens = [*prompts[row, :length].tolist(), *samples.tokens_BxC[row].tolist()]
        logits = reference_logits(model, tokens)[length - 1 : -1]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert (logits.argmax(-1) == samples.tokens_BxC[row]).all()
        np.testing.assert_allclose(samples.log_probs_BxC[row], log_probs.max(-1), atol=TOLERANCE)


def test_bfloat16_is_what_transformers_computes_in_it(tmp_path):
    model = reference_model("gemma3")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    decoder, _ = load_pretrained(tmp_path, dtype="bfloat16")
    for name, value in named_params(decoder).items():
        assert value.dtype == (jnp.float32 if name.endswith("scale") else jnp.bfloat16), name
    # A norm is rounded once, so the bits are the same but where fp32 sums end beside a tie.
    x = np.random.default_rng(1).normal(size=(200, 32)).astype(jnp.bfloat16)
    for ours, theirs in (
        (decoder.final_norm, model.model.norm),
        (_second_norm(decoder), _second_norm(model)),
    ):
        with torch.no_grad():
            expected = theirs(torch.tensor(x.astype(np.float32)).bfloat16()).float().numpy()
        assert np.mean(np.asarray(ours(jnp.asarray(x)), np.float32) == expected) > 0.999
    with torch.no_grad():
        hidden = model.model(torch.tensor(TOKENS)[None]).last_hidden_state[0].float()
        theirs = (hidden @ model.model.embed_tokens.weight.float().T).numpy()
    exact = reference_logits(model.float(), TOKENS)
    # Two independent roundings of one size are 1.4 times as far from each other as from what they round.
    apart = np.abs(full_logits(decoder, TOKENS) - theirs).mean()
    assert apart < 2 * np.abs(theirs - exact).mean() < 0.003 * np.ptp(exact)


def _second_norm(model):
    if isinstance(model, Decoder):
        return model.layers[1].attention_post_norm
    return model.model.layers[1].post_attention_layernorm


def test_old_keys_mean_what_the_new_ones_do(folders, tmp_path):
    """Folders on the hub were written before `rope_parameters`; version 5 of transformers reads them too."""
    for name, changes in {
        "llama3": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "gemma3": {
            "rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3, "layer_types": None,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    }.items():  # fmt: skip
        folder = tmp_path / name
        folders[name][1].save_pretrained(folder)
        change_json(folder / "config.json", rope_parameters=None, **changes)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        expected = reference_logits(model, TOKENS)
        decoder, _ = load_pretrained(folder)
        np.testing.assert_allclose(full_logits(decoder, TOKENS), expected, atol=TOLERANCE)
        assert np.abs(expected - reference_logits(folders[name][1], TOKENS)).max() > 0.01


def test_the_text_part_of_gemma_with_eyes(folders, tmp_path):
    """The larger Gemma 3 models: the decoder's config is a part, its tensors have a prefix."""
    from safetensors.numpy import load_file, save_file

    folder, model = folders["gemma3"]
    text = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {
            name.replace("model.", "model.language_model.", 1): x for name, x in load_file(path).items()
        }
    tensors["model.vision_tower.x"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    decoder, _ = load_pretrained(tmp_path)
    np.testing.assert_allclose(full_logits(decoder, TOKENS), reference_logits(model, TOKENS), atol=TOLERANCE)


@pytest.fixture
def copy(folders, tmp_path):
    """A sharded folder to spoil."""
    folders["llama3"][1].save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": math.nan}, "hidden_size is nan, expected a positive whole number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a positive, finite number"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True"),
        ({"num_hidden_layers": 10**9}, "misfit|1000000000 layers"),
        ({"num_hidden_layers": 2}, "'model.layers.2.input_layernorm.weight' is unexpected"),
        ({"vocab_size": 10**9}, "sizes up to 1000000000"),
        ({"vocab_size": 96}, r"embed_tokens.weight has shape \(97, 32\), expected \(96, 32\)"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": 3, "head_dim": 8}, "not a multiple"),
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of llama"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"hidden_act": "gelu"}, "activation is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, "factor is inf"),
        ({"rope_parameters": [1]}, "rope_parameters is .* expected an object"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_a_config_that_does_not_fit(copy, changes, message):
    change_json(copy / "config.json", **changes)
    with pytest.raises(LemonError, match=message):
        load_pretrained(copy)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../model.safetensors", "expected the name of a .safetensors file beside it"),
        ("/etc/passwd", "expected the name"),
        ("sub/x.safetensors", "expected the name"),
        (3, "expected the name"),
        ("absent.safetensors", "absent.safetensors: cannot read it"),
    ],
)
def test_an_index_that_leads_elsewhere(copy, target, message):
    index = copy / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = target
    index.write_text(json.dumps(values))
    with pytest.raises(LemonError, match=message):
        load_pretrained(copy)


def test_damaged_and_missing_files(copy, tmp_path):
    shard = sorted(copy.glob("*.safetensors"))[0]
    sound = shard.read_bytes()
    for spoiled in (sound[:-9], sound[:7], b"", b"\xff" * 64):
        shard.write_bytes(spoiled)
        with pytest.raises(LemonError, match="damaged"):
            load_pretrained(copy)
    shard.unlink()
    with pytest.raises(LemonError, match="cannot read it"):
        load_pretrained(copy)
    # A shard that is whole but not the one the index means.
    shard.write_bytes(sorted(copy.glob("*.safetensors"))[1].read_bytes())
    with pytest.raises(LemonError, match=r"lacks \d+ tensors that"):
        load_pretrained(copy)
    index = copy / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(LemonError, match="not JSON"):
        load_pretrained(copy)
    index.write_text('{"weight_map": []}')
    with pytest.raises(LemonError, match="weight_map is"):
        load_pretrained(copy)
    (copy / "config.json").write_text("[1]")
    with pytest.raises(LemonError, match="expected a JSON object"):
        load_pretrained(copy)
    (copy / "config.json").unlink()
    with pytest.raises(LemonError, match="cannot read it"):
        load_pretrained(copy)


def test_a_tensor_of_another_type(copy):
    from safetensors.numpy import load_file, save_file

    shard = sorted(copy.glob("*.safetensors"))[0]
    save_file({name: np.zeros(x.shape, np.int8) for name, x in load_file(shard).items()}, shard)
    with pytest.raises(LemonError, match="is of type I8, expected one of F32, BF16, F16"):
        load_pretrained(copy)
