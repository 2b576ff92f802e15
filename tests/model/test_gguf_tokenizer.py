"""Tokenizers rebuilt from GGUF values, against those that the values were taken from."""

import json

import numpy as np
import pytest
import sentencepiece
from gguf_files import gguf_writer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import gguf_values, hub_tokenizer
from text_samples import samples

from lemon_jax.errors import LemonError
from lemon_jax.model import Tokenizer, train_tokenizer
from lemon_jax.model.gguf_tokenizer import gguf_tokenizer
from lemon_jax.model.pretrained_text import load_pretrained_text, load_tokenizer

TEXTS = samples(120)
PRE = {"qwen": "qwen2", "gpt-2": "gpt-2", "smollm": "smollm"}


@pytest.mark.parametrize("kind", PRE)
def test_byte_level_tokenizers_are_the_hubs(kind):
    hub = hub_tokenizer(kind)
    ours = gguf_tokenizer(gguf_values(kind, PRE[kind]))
    assert (ours.vocab_size, ours.eos_ids, ours.bos_id) == (hub.vocab_size, hub.eos_ids, None)
    assert ours.control_symbols() == hub.control_symbols()
    assert ours.token_bytes() == hub.token_bytes()
    for text in TEXTS:
        assert ours.encode(text) == hub.encode(text)
        assert ours.decode(hub.encode_prompt(text)) == hub.decode(hub.encode_prompt(text))


def test_whole_words_of_llama_3_are_not_merged():
    values = gguf_values("gpt-2", "llama-bpe")
    last = len(values["tokens"]) - 1
    values["tokens"][last], values["token_type"][last] = "wholly", 1  # no merge makes it
    assert gguf_tokenizer(values).encode("wholly") == [last]
    assert last not in gguf_tokenizer(values | {"pre": "qwen2"}).encode("wholly")
    numbers = {pre: gguf_tokenizer(values | {"pre": pre}).encode("12345") for pre in ("llama-bpe", "qwen2")}
    assert len(numbers["qwen2"]) == 5  # digit by digit; Llama 3 takes three at a time


def test_which_families_begin_a_text_with_bos():
    values = gguf_values("gpt-2", "llama-bpe")
    assert gguf_tokenizer(values).bos_id is None  # the file says so
    del values["add_bos_token"]
    assert gguf_tokenizer(values).bos_id == values["bos_token_id"]
    assert gguf_tokenizer(values | {"pre": "gpt-2"}).bos_id is None


def test_a_reply_ends_where_it_does_with_llama_cpp():
    values = gguf_values("qwen", "qwen2")
    ends = ["<|repo_name|>", "<|file_sep|>", "<|fim_pad|>", "<EOT>", "_<EOT>"]
    first = len(values["tokens"]) - 7  # rows that no piece has
    for i, text in enumerate([*ends, "<|fim_middle|>", "</s>"], start=first):
        values["tokens"][i], values["token_type"][i] = text, 3
    values["token_type"][first + 6] = 1  # Qwen's "</s>" is a piece of text, which a policy may write
    before = gguf_tokenizer(gguf_values("qwen", "qwen2")).eos_ids
    found = gguf_tokenizer(values).eos_ids
    assert found[: len(before)] == before
    assert sorted(found[len(before) :]) == list(range(first, first + 5))


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "t.model"
    train_tokenizer([text for text in TEXTS if text.strip()], path, 700)
    return sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())


def score_values(model, **more):
    pieces = range(model.vocab_size())
    kinds = {model.is_unknown: 2, model.is_control: 3, model.is_unused: 5, model.is_byte: 6}
    return {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in pieces],
        "scores": [float(model.get_score(i)) for i in pieces],
        "token_type": [next((n for kind, n in kinds.items() if kind(i)), 1) for i in pieces],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_space_prefix": False,
    } | more


def test_sentencepiece_models_are_the_same_by_their_scores(own_model, tmp_path):
    ours = gguf_tokenizer(score_values(own_model))
    assert isinstance(ours, Tokenizer)
    assert (ours.bos_id, ours.eos_ids, ours.pad_id) == (1, (2,), 2)
    for text in TEXTS:
        assert ours.encode_prompt(text.replace("\u2581", "")) == own_model.encode(text.replace("\u2581", ""))
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode_prompt("a</s>b") == [*own_model.encode("a"), 2, *own_model.encode("b")]
    assert 2 not in ours.encode("a</s>b")
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.sha256, again.eos_ids) == (ours.sha256, ours.eos_ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_model_whose_texts_begin_with_a_space(own_model, data):
    spaced = gguf_tokenizer(score_values(own_model, add_space_prefix=True))
    text = data.draw(st.text(max_size=20))
    assert spaced.decode(spaced.encode(text)) == text  # a part of a text gets no space of its own
    prompt = spaced.decode(spaced.encode_prompt(text))
    assert prompt == text or prompt.replace(" ", "") == text.replace(" ", "")
    ids = data.draw(st.lists(st.integers(0, spaced.vocab_size - 1), max_size=20))
    decoded, offsets = spaced.decode(ids), spaced.offsets(ids)
    assert sorted({i for start, end in offsets for i in range(start, end)}) == list(range(len(decoded)))


def test_symbols_of_spaces_are_found_before_pieces(own_model):
    values = score_values(own_model)
    values["tokens"].append(" " * 11)  # llama.cpp's converter writes such symbols with plain spaces
    values["scores"].append(-1000.0)
    values["token_type"].append(4)
    assert gguf_tokenizer(values).encode("a" + " " * 11 + "b")[1] == len(values["tokens"]) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is unknown, expected one of gpt2, llama"),
        ({"model": None}, "tokenizer model None is unknown"),
        ({"model": ["gpt2"]}, "tokenizer model ['gpt2'] is unknown"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is unknown, expected one of gpt-2, smollm"),
        ({"pre": None}, "pre-tokenizer None is unknown"),
        ({"pre": [2]}, "pre-tokenizer [2] is unknown"),
        ({"tokens": None}, "tokenizer.ggml.tokens is NoneType, expected a list of str"),
        ({"token_type": [1, 2]}, "tokens have 2 types"),
        ({"token_type": ["a"]}, "tokenizer.ggml.token_type is list, expected a list of int"),
        ({"merges": None}, "tokenizer.ggml.merges is NoneType"),
        ({"merges": ["no such"]}, "does not read it"),
        ({"merges": ["nospace"]}, "does not read it"),
        ({"eos_token_id": 10**9}, "eos_token_id is 1000000000, expected a whole number below 6"),
        ({"eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x', expected a whole number"),
        ({"padding_token_id": -1}, "padding_token_id is -1, expected"),
        ({"bos_token_id": 10**9, "add_bos_token": True}, "bos_token_id is 1000000000, expected"),
        ({"eot_token_id": -2}, "eot_token_id is -2, expected"),
    ],
)
def test_values_that_make_no_tokenizer_are_named(change, message):
    with pytest.raises(LemonError) as fault:
        gguf_tokenizer(gguf_values("qwen", "qwen2") | change)
    assert message in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unknown_token_id": 4_000_000_000}, "unknown_token_id is 4000000000, expected a whole number"),
        ({"bos_token_id": 700}, "bos_token_id is 700, expected a whole number"),  # and is not used
        ({"bos_token_id": -1}, "bos_token_id is -1, expected a whole number"),
        ({"template": 5}, "tokenizer.chat_template is int, expected a text"),
        ({"template": [1]}, "tokenizer.chat_template is list, expected a text"),
    ],
)
def test_a_file_whose_text_side_is_hostile(change, message, tmp_path):
    def write(path, values):
        with gguf_writer(path, "qwen2") as writer:
            add = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
            for name, value in values.items():
                key = "tokenizer.chat_template" if name == "template" else f"tokenizer.ggml.{name}"
                add.get(type(value), writer.add_int64)(key, value)
            writer.add_tensor("t", np.ones(1, np.float32))

    sound = gguf_values("qwen", "qwen2") | {"template": "{{ messages[0].content }}"}
    write(tmp_path / "sound.gguf", sound)
    assert load_pretrained_text(tmp_path / "sound.gguf", 0).template is not None
    write(tmp_path / "hostile.gguf", sound | change)
    with pytest.raises(LemonError) as fault:
        load_pretrained_text(tmp_path / "hostile.gguf", 0)
    assert f"hostile.gguf: {message}" in str(fault.value).replace("tokenizer.ggml.", "")


def test_two_tokens_of_one_text(own_model):
    values = gguf_values("qwen", "qwen2")
    values["tokens"][9] = values["tokens"][8]
    with pytest.raises(LemonError, match="two tokens have the same text"):
        gguf_tokenizer(values)
    values = score_values(own_model)
    values["tokens"][300] = values["tokens"][301]
    with pytest.raises(LemonError, match="not a SentencePiece model"):
        gguf_tokenizer(values)
    with pytest.raises(LemonError, match="unknown_token_id is 9999, expected"):
        gguf_tokenizer(score_values(own_model, unknown_token_id=9999))


def test_values_are_those_of_the_json_they_came_from():
    values = gguf_values("qwen", "qwen2")
    assert json.loads(json.dumps(values)) == values
