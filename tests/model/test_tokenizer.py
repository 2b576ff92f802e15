"""Exact round trips, offsets of arbitrary ids, deterministic training."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lemon_jax.errors import LemonError
from lemon_jax.model import Tokenizer, covering_tokens, train_tokenizer

SPEC = """\
version: 1
agents:
  - id: a1
    name: {name}
    role: mathematical_analyst
    duty: "Write the speed ratio as an equation and solve it."
    capacity: small
    depends_on: []
  - id: a2
    name: Final solver
    role: math_solver
    duty: "Check the equation, compute the value, choose the option."
    capacity: medium
    depends_on: [a1]
output: a2
"""
NAMES = ["Ratio analyst", "Speed analyst", "Unit checker", "Equation writer", "Option chooser"]
TEXTS = [SPEC.format(name=name) for name in NAMES] + [
    f"A train runs {60 + n} km in {n} hours. What is its mean speed?\n(A) 20 (B) 30 (C) 40\n"
    for n in range(2, 12)
]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    return train_tokenizer(TEXTS, path, 420, model_type=request.param)


def test_specs_round_trip_in_few_tokens(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert sum(len(tokenizer.encode(text)) for text in TEXTS) < 0.7 * sum(map(len, TEXTS))
    assert tokenizer.vocab_size <= 420
    assert [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id] == [0, 1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(st.text())
@example("  two\n\n    four\ttab\r\n ")
@example("\u2581 is not a space \u2581\u2581")
@example("</s><s><pad><0x0A>")
@example("nul \0, e\u0301 and \u00e9, \U0001f9d1\u200d\U0001f680, \ufffd")
def test_every_text_round_trips_and_offsets_tile_it(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id} & set(ids)
    offsets = tokenizer.offsets(ids)
    assert sorted({i for start, end in offsets for i in range(start, end)}) == list(range(len(text)))
    for token_id, (start, end) in zip(ids, offsets, strict=True):
        piece = tokenizer.decode([token_id])
        assert text[start:end] == piece or "\ufffd" in piece  # a lone byte of a longer character


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_offsets_of_arbitrary_sampled_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text, offsets = tokenizer.decode(ids), tokenizer.offsets(ids)
    assert len(offsets) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert sorted({i for start, end in offsets for i in range(start, end)}) == list(range(len(text)))
    assert offsets == sorted(offsets)
    for i in range(len(text)):
        first, last = covering_tokens(offsets, i, i + 1)
        assert first < last
        touching = [k for k, (start, end) in enumerate(offsets) if start <= i < end]
        assert (first, last) == (touching[0], touching[-1] + 1)


def test_bytes_of_one_character_share_it(tokenizer):
    ids = [tokenizer.bos_id, *tokenizer.encode("\u6f22\u20ac"), tokenizer.eos_id]
    assert tokenizer.offsets(ids) == [(0, 0), *[(0, 1)] * 3, *[(1, 2)] * 3, (2, 2)]
    assert covering_tokens(tokenizer.offsets(ids), 1, 2) == (4, 7)


def test_covering_tokens_is_the_smallest_range():
    offsets = [(0, 2), (2, 7), (7, 7), (7, 10)]
    assert covering_tokens(offsets, 3, 6) == (1, 2)
    assert covering_tokens(offsets, 2, 7) == (1, 2)  # the control id at 7 covers nothing
    assert covering_tokens(offsets, 6, 8) == (1, 4)
    assert covering_tokens(offsets, 0, 10) == (0, 4)
    assert covering_tokens(offsets, 7, 7) == (3, 3)
    assert covering_tokens(offsets, 10, 10) == (4, 4)
    assert covering_tokens([], 0, 0) == (0, 0)
    for start, end in [(3, 11), (-1, 2), (5, 4)]:
        with pytest.raises(ValueError, match="the span is"):
            covering_tokens(offsets, start, end)


def test_training_is_deterministic_and_the_file_is_the_tokenizer(tokenizer, tmp_path, request):
    model_type = request.node.callspec.params["tokenizer"]
    again = train_tokenizer(TEXTS, tmp_path / "again.model", 420, model_type=model_type)
    assert again.sha256 == tokenizer.sha256
    assert Tokenizer(tmp_path / "again.model").encode(SPEC) == Tokenizer(again.proto).encode(SPEC)


def test_faults_name_the_file(tmp_path):
    damaged = tmp_path / "damaged.model"
    damaged.write_bytes(b"\x0a\xffnot a model")
    for path, message in [(damaged, "not a SentencePiece model"), (tmp_path / "none.model", "cannot read")]:
        with pytest.raises(LemonError, match=f"{path.name}: {message}"):
            Tokenizer(path)
    with pytest.raises(LemonError, match=r"tiny\.model: cannot train a bpe tokenizer of 100 pieces"):
        train_tokenizer(TEXTS, tmp_path / "tiny.model", 100)


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for method in (tokenizer.decode, tokenizer.offsets):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            method([tokenizer.vocab_size])
