"""The orchestrator policy: reads a task, writes specs, and knows which tokens it wrote them with."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lemon_jax.errors import LemonError
from lemon_jax.model import (
    Automaton,
    Constraint,
    Decoder,
    DecoderConfig,
    Samples,
    Tokenizer,
    Walk,
    load_weights,
    params_sha256,
    sample,
    sample_constrained,
    save_weights,
)
from lemon_jax.model.host_walk import Pieces, pieces_of
from lemon_jax.model.sharding import fetch, using
from lemon_jax.spec import Parsed, parse
from lemon_jax.spec_automaton import spec_automaton

WEIGHTS_FILE = "policy.safetensors"
TOKENIZER_FILE = "tokenizer.model"
MANIFEST_FILE = "manifest.json"
SEPARATOR = "\n\nSpec:\n"  # between the task and the spec
PROMPT_BUCKET = 32  # prompt slots are a multiple of this, so that few shapes are compiled
EVAL_BATCH = 16
LIMITS = {"max_prompt": 256, "max_new": 320}  # in tokens; a policy's manifest may name others


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled spec. `token_ids` are the sampled ids (end token included) and are never re-encoded;
    `log_probs` are those of the distribution that sampled them; `text` is what the ids spell, also where
    `parsed` is a repair of it."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finished: bool
    text: str
    parsed: Parsed

    @property
    def valid(self) -> bool:
        return self.finished and self.parsed.strict_ok


class Orchestrator:
    """A decoder with its tokenizer. `max_prompt` and `max_new` are in tokens."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        tokenizer: Tokenizer,
        *,
        max_prompt: int = LIMITS["max_prompt"],
        max_new: int = LIMITS["max_new"],
    ):
        if config.vocab_size != tokenizer.vocab_size:
            raise LemonError(
                f"the policy has a vocabulary of {config.vocab_size}, its tokenizer one of "
                f"{tokenizer.vocab_size}; take both from the same policy folder"
            )
        self.decoder = decoder
        self.config = config
        self.tokenizer = tokenizer
        self.max_prompt = max_prompt
        self.max_new = max_new

    def with_decoder(self, decoder: Decoder) -> Orchestrator:
        """The same policy with other parameters."""
        other = copy.copy(self)  # with what is known of the language already
        other.decoder = decoder
        return other

    @classmethod
    def load(cls, folder: Path) -> Orchestrator:
        """A policy folder: weights, tokenizer, manifest. Raises LemonError naming what is damaged."""
        if not folder.is_dir():
            raise LemonError(f"{folder}: no such policy folder; train one with experiments/sft.py")
        manifest = read_manifest(folder)
        decoder, config = load_weights(folder / WEIGHTS_FILE)
        tokenizer = Tokenizer(folder / TOKENIZER_FILE)
        # A safetensors file carries no checksum of its own: a flipped byte would load as another number.
        found = {
            "params_sha256": (WEIGHTS_FILE, params_sha256(decoder)),
            "tokenizer_sha256": (TOKENIZER_FILE, tokenizer.sha256),
        }
        for key, (name, digest) in found.items():
            if manifest.get(key, digest) != digest:
                raise LemonError(
                    f"{folder / name}: {key} is {digest[:12]}…, the manifest says "
                    f"{str(manifest[key])[:12]}…; restore the folder or train the policy again"
                )
        limits = {name: manifest.get(name, default) for name, default in LIMITS.items()}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < PROMPT_BUCKET:
                raise LemonError(
                    f"{folder / MANIFEST_FILE}: {name} is {value!r}, expected a whole number of tokens of at "
                    f"least {PROMPT_BUCKET}; restore the folder"
                )
        return cls(decoder, config, tokenizer, **limits)

    def save(self, folder: Path, manifest: dict[str, Any], *, dtype: str = "bfloat16") -> None:
        """Write a policy folder that `load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{WEIGHTS_FILE}.*"):  # of a save that was killed
            leftover.unlink()
        save_weights(folder / WEIGHTS_FILE, self.decoder, self.config, dtype=dtype)  # type: ignore[arg-type]
        (folder / TOKENIZER_FILE).write_bytes(self.tokenizer.proto)
        facts = {
            "max_prompt": self.max_prompt,
            "max_new": self.max_new,
            "tokenizer_sha256": self.tokenizer.sha256,
        }
        text = json.dumps(manifest | facts, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")

    @cached_property
    def automaton(self) -> Automaton:
        """The spec language over the policy's tokens, in NumPy arrays.

        Raises LemonError if `max_new` is too small for the shortest spec.
        """
        automaton = spec_automaton(self.tokenizer)
        shortest = len(automaton.prefix_F) + int(automaton.distance_S[automaton.start])
        if shortest > self.max_new:
            raise LemonError(
                f"{MANIFEST_FILE}: max_new is {self.max_new}, the shortest spec has {shortest} tokens; "
                "raise it, or sample without --constrained"
            )
        return automaton

    @cached_property
    def constraint(self) -> Constraint:
        """What constrained specs are sampled and scored under, on the device."""
        return Constraint(jax.tree.map(jnp.asarray, self.automaton), self.max_new)

    @cached_property
    def pieces(self) -> Pieces:
        """The ids of tokens by what they spell."""
        return pieces_of(self.tokenizer.token_bytes())

    def prompt_ids(self, task_text: str) -> list[int]:
        """bos, the task, the separator; a task too long for `max_prompt` loses its middle."""
        tail = self.tokenizer.encode(SEPARATOR)
        body = self.tokenizer.encode(task_text)
        room = self.max_prompt - len(tail) - 1
        if len(body) > room:
            # The question's beginning and the options at its end say more about it than its middle.
            body = body[: room - room // 2] + body[len(body) - room // 2 :]
        return [self.tokenizer.bos_id, *body, *tail]

    def prompt_slots(self, task_texts: Sequence[str]) -> int:
        """The common padded prompt length for these tasks."""
        longest = max((len(self.prompt_ids(text)) for text in task_texts), default=1)
        return -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET

    def spell(
        self, rollout: Rollout, first: int, text: str, canonical: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Tokens that could have been sampled for `text` in place of the `first`-th and later ones of a
        constrained rollout: `canonical` if possible. None if the language has no such text there, or too
        few of the `max_new` tokens are left for it."""
        prefix = len(self.automaton.prefix_F)
        if first < prefix:
            return None
        here = Walk.begin(self.automaton, self.max_new).follow(rollout.token_ids[prefix:first])
        return None if here is None else here.spell(text, canonical, self.pieces)

    def write(
        self,
        task_texts: Sequence[str],
        key: jax.Array,
        *,
        group: int,
        temperature: float = 1.0,
        prompt_slots: int | None = None,
        decoder: Decoder | None = None,
        constrained: bool = False,
    ) -> list[Rollout]:
        """`group` specs for each task; rollout n * group + g is spec g of task n.

        Constrained ones are all finished and strictly valid (`spec.grammar` says what they may hold). All are
        written on the mesh of the decoder's parameters, if these lie on one, and every host gets them.
        """
        decoder = decoder or self.decoder
        prompts = [self.prompt_ids(text) for text in task_texts]
        slots = prompt_slots or self.prompt_slots(task_texts)
        padded_NxP, lengths_N = pad(prompts, slots, self.tokenizer.pad_id)
        given = (decoder, padded_NxP, lengths_N, key)
        static = {"group": group, "max_new": self.max_new, "temperature": temperature}
        language = self.constraint.automaton if constrained else None
        with using(decoder):
            if language is not None:
                samples = sample_constrained(*given, language, **static, eos_ids=(self.tokenizer.eos_id,))
            else:
                samples = sample(*given, **static, eos_id=self.tokenizer.eos_id)
        return self._rollouts(prompts, fetch(samples), group)

    def write_greedy(
        self,
        task_texts: Sequence[str],
        *,
        prompt_slots: int | None = None,
        decoder: Decoder | None = None,
        constrained: bool = False,
    ) -> list[Rollout]:
        """The likeliest spec for each task, token by token; in batches of one fixed shape."""
        slots = prompt_slots or self.prompt_slots(task_texts)
        out: list[Rollout] = []
        for start in range(0, len(task_texts), EVAL_BATCH):
            batch = list(task_texts[start : start + EVAL_BATCH])
            filled = batch + [batch[-1]] * (EVAL_BATCH - len(batch))
            rollouts = self.write(
                filled,
                jax.random.key(0),
                group=1,
                temperature=0.0,
                prompt_slots=slots,
                decoder=decoder,
                constrained=constrained,
            )
            out += rollouts[: len(batch)]
        return out

    def _rollouts(self, prompts: list[list[int]], samples: Samples, group: int) -> list[Rollout]:
        out = []
        for row, length in enumerate(samples.lengths_B):
            ids = tuple(int(i) for i in samples.tokens_BxC[row, :length])
            finished = bool(samples.finished_B[row])
            text = self.tokenizer.decode(ids[:-1] if finished else ids)
            out.append(
                Rollout(
                    prompt_ids=tuple(prompts[row // group]),
                    token_ids=ids,
                    log_probs=tuple(float(x) for x in samples.log_probs_BxC[row, :length]),
                    finished=finished,
                    text=text,
                    parsed=parse(text),
                )
            )
        return out


def pad(rows: Sequence[Sequence[int]], slots: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ids [len(rows), slots] and their lengths. Raises ValueError for a row that is too long."""
    out = np.full((len(rows), slots), pad_id, np.int32)
    for i, row in enumerate(rows):
        if len(row) > slots:
            raise ValueError(f"row {i} has {len(row)} tokens, there are {slots} slots")
        out[i, : len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a policy folder. Raises LemonError where it is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LemonError(
            f"{path}: cannot read the policy's manifest ({error}); restore the folder"
        ) from error
    if not isinstance(manifest, dict):
        raise LemonError(f"{path}: expected a JSON object; restore the folder")
    return manifest
