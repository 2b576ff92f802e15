"""Decoders that are saved in the hub's layout: what transformers makes of them."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import sentencepiece
from model_helpers import TINY, full_logits, random_decoder
from pretrained_helpers import CONFIGS, reference_logits, reference_model, torch, transformers

from lemon_jax.errors import LemonError
from lemon_jax.model import TokenIds, Tokenizer, load_pretrained, named_params, train_tokenizer
from lemon_jax.model.hub_save import save_pretrained
from lemon_jax.model.pretrained_text import load_pretrained_text
from lemon_jax.model.sentencepiece_proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    from_pieces,
    user_defined,
)
from lemon_jax.orchestrator import Orchestrator

TOKENS = np.random.default_rng(0).integers(0, 97, 20)
WARMSTART = Path(__file__).resolve().parents[2] / "checkpoints" / "warmstart"


def loaded(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_every_family(name, tmp_path):
    reference_model(name).save_pretrained(tmp_path / "theirs")
    decoder, config = load_pretrained(tmp_path / "theirs")
    shard = 20_000 if name in ("llama3", "gemma3") else 1 << 30
    save_pretrained(tmp_path / "ours", decoder, config, max_positions=128, max_shard_bytes=shard)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == (shard == 20_000)
    again, config_again = load_pretrained(tmp_path / "ours")
    assert config_again == config
    expected = full_logits(decoder, TOKENS)
    np.testing.assert_allclose(reference_logits(loaded(tmp_path / "ours"), TOKENS), expected, atol=1e-4)
    for key, value in named_params(again).items():  # the scales of Gemma lose a bit by - 1 and + 1
        np.testing.assert_allclose(value, named_params(decoder)[key], atol=1e-6)


def test_old_readers_find_the_same_config(tmp_path):
    """Without the key of version 5, the older ones say the same: vLLM and transformers 4 read those."""
    for name in ("llama3", "gemma3"):
        reference_model(name).save_pretrained(tmp_path / name)
        decoder, config = load_pretrained(tmp_path / name)
        save_pretrained(tmp_path / f"{name}-ours", decoder, config, max_positions=128)
        path = tmp_path / f"{name}-ours" / "config.json"
        values = json.loads(path.read_text())
        for key in ("rope_parameters", "dtype"):
            del values[key]
        path.write_text(json.dumps(values))
        assert load_pretrained(path.parent)[1] == config
        expected = full_logits(decoder, TOKENS)
        np.testing.assert_allclose(reference_logits(loaded(path.parent), TOKENS), expected, atol=1e-4)


def test_the_shipped_policy_is_a_llama(tmp_path):
    """It samples greedily in transformers what it does here, from its own text, and reads the same ids."""
    policy = Orchestrator.load(WARMSTART)
    save_pretrained(
        tmp_path / "hub", policy.decoder, policy.config, policy.tokenizer,
        max_positions=policy.max_prompt + policy.max_new, dtype="bfloat16",
    )  # fmt: skip
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    text = "Ann has 3 apples and buys 4 more.\n\nSpec:\n"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    ids = tokenizer(text)["input_ids"]
    assert ids == [policy.tokenizer.bos_id, *policy.tokenizer.encode(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    model = loaded(tmp_path / "hub")
    expected = full_logits(policy.decoder, ids[:20])
    np.testing.assert_allclose(reference_logits(model, ids[:20]), expected, atol=1e-3)  # logits reach 30
    (rollout,) = policy.write(["Ann has 3 apples."], jax.random.key(0), group=1, temperature=0.0)
    prompt = torch.tensor([rollout.prompt_ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False)
    assert out[0, len(rollout.prompt_ids) :].tolist() == list(rollout.token_ids[:40])


def test_tokenizers_give_the_same_ids(tmp_path):
    tokenizer = Tokenizer(WARMSTART / "tokenizer.model")
    save_pretrained(tmp_path / "hub", random_decoder(), TINY, tokenizer, max_positions=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    rng = np.random.default_rng(0)
    texts = (WARMSTART.parents[1] / "docs" / "spec_language.md").read_text(encoding="utf-8").split("\n\n")
    texts += ["", " ", "  a  b", "</s><s> <0x41> <unk>", "日本語 é ñ 😀\n\tx", "\x00\x7f", "1234567890"]
    letters = list("ab cdeagent:\n  -0123456789solververify")
    texts += ["".join(rng.choice(letters, rng.integers(1, 80))) for _ in range(200)]
    for text in texts:
        assert theirs(text)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode(text)], text
    # The one exception, which the docstring names: here the character itself is bytes, there it is a space.
    assert theirs("\u2581")["input_ids"] != [tokenizer.bos_id, *tokenizer.encode("\u2581")]


def with_own_pieces(own, *, spaced=False):
    """The shipped tokenizer with pieces of a user's own, of one score, as GGUF files of Gemma have them."""
    of = sentencepiece.SentencePieceProcessor(model_proto=(WARMSTART / "tokenizer.model").read_bytes())
    ids = range(of.vocab_size())
    kinds = {of.is_unknown: UNKNOWN, of.is_control: CONTROL, of.is_byte: BYTE}
    types = [next((kind for is_, kind in kinds.items() if is_(i)), NORMAL) for i in ids]
    pieces, scores = [of.id_to_piece(i) for i in ids], [of.get_score(i) for i in ids]
    for piece in own:
        if piece in pieces:
            at = pieces.index(piece)
            scores[at], types[at] = -1000.0, USER_DEFINED
        else:
            pieces, scores, types = [*pieces, piece], [*scores, -1000.0], [*types, USER_DEFINED]
    proto = from_pieces(pieces, scores, types, unk_id=of.unk_id(), add_dummy_prefix=spaced)
    return Tokenizer(proto, TokenIds(vocab_size=len(pieces), pad_id=0, bos_id=1, eos_ids=(2,)))


def test_pieces_of_a_users_own_are_found_first(tmp_path):
    tokenizer = with_own_pieces(["\n\n", "\u2581\u2581", "\u2581" * 4, "<table>", "ge", "gen", "ent a"])
    save_pretrained(tmp_path / "hub", random_decoder(), TINY, tokenizer, max_positions=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    again = load_pretrained_text(tmp_path / "hub", tokenizer.vocab_size).tokenizer
    rng = np.random.default_rng(0)
    texts = ["  a\n\n\nagents: <table> </table> <s>\n     - agent agenda", "", " ", "genent a  "]
    letters = ["ab", "agent", " ", "  ", "\n", "\n\n", "<table>", "ge", "n", "ent", "</s>", "1", "日"]
    texts += ["".join(rng.choice(letters, rng.integers(1, 30))) for _ in range(200)]
    used = set()
    for text in texts:
        ids = tokenizer.encode(text)
        used |= set(ids)
        assert theirs(text)["input_ids"] == [tokenizer.bos_id, *ids], text
        assert again.encode(text) == ids
        assert theirs.decode(ids) == again.decode(ids) == text
    assert len(user_defined(tokenizer.proto)) == 7
    assert user_defined(tokenizer.proto) <= used


def test_what_cannot_be_saved(tmp_path):
    decoder = random_decoder()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(LemonError, match="expected a folder that is empty"):
        save_pretrained(tmp_path / "full", decoder, TINY, max_positions=64)
    for change in ({"qk_norm": True, "qkv_bias": True}, {"sliding_layers": (0,), "sliding_window": 4}):
        odd = dataclasses.replace(TINY, **change)
        with pytest.raises(LemonError, match="fit none of the families"):
            save_pretrained(tmp_path / "odd", random_decoder(odd), odd, max_positions=64)
    texts = [f"agent {i} checks the number {i * 7}" for i in range(300)]
    unigram = train_tokenizer(texts, tmp_path / "u.model", 300, model_type="unigram")
    spaced = with_own_pieces(["<table>"], spaced=True)
    for tokenizer, said in ((unigram, "only BPE models"), (spaced, "begins texts with a space")):
        with pytest.raises(LemonError, match=said):
            save_pretrained(tmp_path / "none", decoder, TINY, tokenizer, max_positions=64)
        assert not (tmp_path / "none").exists()  # and another try is not refused for what lies there
