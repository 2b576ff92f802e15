"""SentencePiece models as protocol buffers: of the pieces of a GGUF file, and one that keeps texts exact."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2 as pb

from lemon_jax.errors import LemonError
from lemon_jax.model.text_tokenizer import SPACE_MARK

# The numbers of piece types are the same in both kinds of file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def exact(proto: bytes) -> bytes:
    """The same model without anything that makes decoded text differ from what was encoded.

    Raises ValueError for bytes that are no model.
    """
    try:
        model = pb.ModelProto.FromString(proto)  # type: ignore[attr-defined]
    except DecodeError as error:
        raise ValueError(str(error)) from error
    model.normalizer_spec.Clear()
    model.denormalizer_spec.Clear()
    _keep_text(model, add_dummy_prefix=False)
    return model.SerializeToString()


def user_defined(proto: bytes) -> set[int]:
    """Ids of the pieces that a model takes whole wherever they are found; the library cannot tell."""
    pieces = pb.ModelProto.FromString(proto).pieces  # type: ignore[attr-defined]
    return {i for i, piece in enumerate(pieces) if piece.type == USER_DEFINED}


def from_pieces(
    pieces: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unk_id: int,
    add_dummy_prefix: bool,
) -> bytes:
    """A model of these pieces, in order of their ids. Raises LemonError for lists of different lengths."""
    if not len(pieces) == len(scores) == len(types) or not 0 <= unk_id < len(pieces):
        raise LemonError(
            f"tokenizer: {len(pieces)} tokens with {len(scores)} scores and {len(types)} types, unknown "
            f"token {unk_id}; fetch the model file again"
        )
    model = pb.ModelProto()  # type: ignore[attr-defined]
    trainer = model.trainer_spec
    trainer.model_type = trainer.BPE  # by score, as llama.cpp joins pieces
    trainer.byte_fallback = True
    trainer.vocab_size = len(pieces)
    trainer.unk_id = unk_id
    trainer.unk_piece = pieces[unk_id]
    for i, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True)):
        # SentencePiece wants exactly one unknown piece; some files call it a control symbol.
        kind = UNKNOWN if i == unk_id else CONTROL if kind == UNKNOWN else kind
        # llama.cpp finds pieces of a user's own before it marks spaces, SentencePiece after it.
        piece = piece.replace(" ", SPACE_MARK) if kind == USER_DEFINED else piece
        model.pieces.add(piece=piece, score=score, type=kind)
    _keep_text(model, add_dummy_prefix=add_dummy_prefix)
    return model.SerializeToString()


def _keep_text(model: pb.ModelProto, *, add_dummy_prefix: bool) -> None:  # type: ignore[name-defined]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = add_dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
