"""tokenizer.json tokenizers: exact round trips, offsets of arbitrary ids, the library's own ids and texts."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import CONTROLS, KINDS, hub_tokenizer, token_ids, tokenizer_json
from text_samples import samples
from tokenizers import Tokenizer as Library

from lemon_jax.errors import LemonError
from lemon_jax.model import covering_tokens
from lemon_jax.model.hub_tokenizer import HubTokenizer
from lemon_jax.model.text_tokenizer import TextTokenizer, TokenIds, piece_offsets, text_of

TEXTS = samples(200)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind):
    return hub_tokenizer(kind)


def check_offsets(text, offsets, count):
    assert len(offsets) == count
    assert offsets == sorted(offsets)
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert sorted({i for start, end in offsets for i in range(start, end)}) == list(range(len(text)))


@settings(max_examples=60, deadline=None)
@given(st.text())
@example("  two\n\n    four\ttab\r\n ")
@example("\u2581 is not a space \u2581\u2581")
@example("<|im_end|><tool_call><0x0A><unk>")
@example("nul \0, e\u0301 and \u00e9, \U0001f9d1\u200d\U0001f680, \ufffd")
def test_every_text_round_trips_and_offsets_tile_it(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(tokenizer.control_symbols().values()) & set(ids)
    check_offsets(text, tokenizer.offsets(ids), len(ids))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_offsets_of_arbitrary_sampled_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text, offsets = tokenizer.decode(ids), tokenizer.offsets(ids)
    check_offsets(text, offsets, len(ids))
    for i in range(len(text)):
        first, last = covering_tokens(offsets, i, i + 1)
        touching = [k for k, (start, end) in enumerate(offsets) if start <= i < end]
        assert (first, last) == (touching[0], touching[-1] + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=4), max_size=12))
def test_offsets_of_arbitrary_bytes_are_those_of_each_byte(pieces):
    """The slow way: a byte begins a character if the text can be cut before it."""
    data, text = b"".join(pieces), text_of(pieces)
    begins = [
        data[:i].decode("utf-8", "replace") + data[i:].decode("utf-8", "replace") == text
        for i in range(len(data))
    ]
    owner = [sum(begins[: i + 1]) - 1 for i in range(len(data))]
    position = 0
    for piece, (start, end) in zip(pieces, piece_offsets(pieces), strict=True):
        if piece:
            assert (start, end) == (owner[position], owner[position + len(piece) - 1] + 1)
        position += len(piece)


def test_bytes_of_one_character_share_it_even_across_a_control_symbol():
    tokenizer = hub_tokenizer("qwen")
    pieces = tokenizer.encode("\u6f22")
    assert len(pieces) == 3
    ids = [tokenizer.eos_id, pieces[0], tokenizer.eos_id, *pieces[1:], *tokenizer.encode("x")]
    assert tokenizer.decode(ids) == "\u6f22x"
    assert tokenizer.offsets(ids) == [(0, 0), (0, 1), (0, 1), (0, 1), (0, 1), (1, 2)]


def test_prompts_and_texts_as_the_library_itself(kind, tokenizer):
    library = Library.from_str(tokenizer_json(kind))
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_prompt(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
    chat = "<|im_start|>user\nHi<|im_end|>\n"
    assert len({*tokenizer.encode_prompt(chat)} & {*tokenizer.control_symbols().values()}) == 2


def test_a_text_in_the_middle_begins_without_a_space():
    tokenizer = hub_tokenizer("llama-2")
    assert tokenizer.decode(tokenizer.encode_prompt("a b")) == " a b"  # as the model's own texts begin
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_rows_without_a_piece_spell_nothing(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.vocab_size - 1, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.offsets(ids) == [(0, 1), (1, 1), (1, 2)]
    for method in (tokenizer.decode, tokenizer.offsets):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            method([tokenizer.vocab_size])
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud800")


def test_it_is_a_text_tokenizer_and_its_files_give_it_back(tokenizer, tmp_path):
    assert isinstance(tokenizer, TextTokenizer)
    tokenizer.save(tmp_path)
    source = (tmp_path / "tokenizer.json").read_bytes().decode()
    again = HubTokenizer(source, TokenIds.read(tmp_path / "tokenizer_ids.json"))
    assert again.sha256 == tokenizer.sha256
    assert again.eos_ids == tokenizer.eos_ids
    assert again.encode(TEXTS[5]) == tokenizer.encode(TEXTS[5])
    other = TokenIds(vocab_size=again.vocab_size, pad_id=0, bos_id=None, eos_ids=(0,))
    assert HubTokenizer(source, other).sha256 != tokenizer.sha256


def changed(kind="qwen", **parts):
    tree = json.loads(tokenizer_json(kind))
    tree["model"] |= parts.pop("model", {})
    return json.dumps(tree | parts)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "not a usable tokenizer.json"),
        ("[]", "not a usable tokenizer.json"),
        ('{"model": {}}', "not a usable tokenizer.json"),
        ("[" * 100_000, "not a usable tokenizer.json"),
        (changed(model={"type": "WordPiece"}), "type 'WordPiece', expected BPE"),
        (changed(model={"merges": [["no", "such"]]}), "does not read it"),
        (changed(model={"end_of_word_suffix": "</w>"}), "prefix or suffix"),
        (changed(pre_tokenizer={"type": "Whitespace"}), 'unknown pre-tokenizer {"type": "Whitespace"}'),
        (changed(normalizer={"type": "Lowercase"}), 'unknown normalizer {"type": "Lowercase"}'),
        (changed(pre_tokenizer=None), "neither a byte-level tokenizer nor"),
        (changed("gemma", normalizer=None), "neither a byte-level tokenizer nor"),
        (changed("gemma", model={"byte_fallback": False}), "neither a byte-level tokenizer nor"),
        (changed(model={"vocab": {"a": 0}, "merges": []}, added_tokens=[]), "no token for 255 of the 256"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(source, message):
    ids = token_ids(tokenizer_json("qwen"))
    with pytest.raises(LemonError) as fault:
        HubTokenizer(source, ids, name="folder/tokenizer.json")
    assert message in str(fault.value)
    assert str(fault.value).startswith("folder/tokenizer.json: ")
    assert "\n" not in str(fault.value)


def test_lengths_of_the_last_batch_and_random_merges_have_no_effect():
    source = changed(
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        model={"dropout": 0.9},
    )
    tokenizer = HubTokenizer(source, token_ids(source))
    assert tokenizer.encode(TEXTS[5]) == hub_tokenizer("qwen").encode(TEXTS[5])


def test_a_character_that_the_tokenizer_has_no_bytes_for_is_named():
    tree = json.loads(tokenizer_json("qwen"))
    # The byte 0xF1, which begins rare planes of Unicode, gives its id to a piece that no merge makes.
    tree["model"]["vocab"]["never made"] = tree["model"]["vocab"].pop("\u00f1")
    source = json.dumps(tree)
    tokenizer = HubTokenizer(source, token_ids(tokenizer_json("qwen")))
    assert tokenizer.decode(tokenizer.encode("\u00f1 \u6f22")) == "\u00f1 \u6f22"
    with pytest.raises(LemonError, match=r"cannot spell '\\U00040000'"):
        tokenizer.encode("x\U00040000")


def test_too_few_rows_for_the_tokens():
    ids = TokenIds(vocab_size=300, pad_id=0, bos_id=None, eos_ids=(1,))
    with pytest.raises(LemonError, match="the model 300 tokens"):
        HubTokenizer(tokenizer_json("qwen"), ids)
    with pytest.raises(LemonError, match=r"\[1\] name \[1\]|name \[9\]"):
        TokenIds(vocab_size=3, pad_id=0, bos_id=None, eos_ids=(9,))
    with pytest.raises(LemonError, match="no id ends a text"):
        TokenIds(vocab_size=3, pad_id=0, bos_id=None, eos_ids=())


def test_control_symbols_without_a_row_are_left_out(tmp_path):
    """Gemma 3 of 270M and 1B parameters: the image's symbol is one past the last row."""
    tree = json.loads(tokenizer_json("gemma"))
    rows = 1 + max(*tree["model"]["vocab"].values(), *(token["id"] for token in tree["added_tokens"]))
    image = {"id": rows, "content": "<image_soft_token>", "special": True, "normalized": False}
    image |= {"single_word": False, "lstrip": False, "rstrip": False}
    ids = TokenIds(vocab_size=rows, pad_id=0, bos_id=None, eos_ids=(1,))
    source = json.dumps(tree | {"added_tokens": [*tree["added_tokens"], image]}, ensure_ascii=False)
    tokenizer = HubTokenizer(source, ids)
    assert sorted(tokenizer.control_symbols()) == sorted(CONTROLS)
    text = "an <image_soft_token>"
    for encoded in (tokenizer.encode_prompt(text), tokenizer.encode(text)):
        assert max(encoded) < rows
        assert tokenizer.decode(encoded) == text
    tokenizer.save(tmp_path)
    saved = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(saved) == tree
    assert HubTokenizer(saved, ids).sha256 == tokenizer.sha256
    ordinary = source.replace('"<image_soft_token>", "special": true', '"picture", "special": false')
    with pytest.raises(LemonError, match=f"token ids up to {rows}, the model {rows} tokens"):
        HubTokenizer(ordinary, ids)


def test_control_symbols_are_known_by_their_text(tokenizer):
    assert sorted(tokenizer.control_symbols()) == sorted(CONTROLS)
