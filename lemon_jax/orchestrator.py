"""The orchestrator policy: reads a task, writes specs, and knows which tokens it wrote them with."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lemon_jax.errors import LemonError
from lemon_jax.files import PART, replace_file
from lemon_jax.model import (
    PACKED,
    Automaton,
    Constraint,
    Decoder,
    DecoderConfig,
    Samples,
    TextTokenizer,
    Walk,
    load_pretrained,
    load_weights,
    params_sha256,
    sample,
    sample_constrained,
    sample_in_parts,
    save_weights,
)
from lemon_jax.model.host_walk import Pieces, pieces_of
from lemon_jax.model.hub_weights import CONFIG_FILE as HUB_CONFIG
from lemon_jax.model.pretrained_text import TEXT_FILES, load_pretrained_text, load_tokenizer
from lemon_jax.model.sharding import fetch, using
from lemon_jax.model.tokenizer import TOKENIZER_FILE
from lemon_jax.policy_prompt import SEPARATOR, TEMPLATE_FILE, ChatPrompt, TaskPrompt
from lemon_jax.spec import Parsed, parse
from lemon_jax.spec_automaton import spec_automaton

__all__ = [
    "EVAL_BATCH",
    "MANIFEST_FILE",
    "PROMPT_BUCKET",
    "SEPARATOR",
    "TOKENIZER_FILE",
    "WEIGHTS_FILE",
    "Orchestrator",
    "Rollout",
    "pad",
    "read_manifest",
]

WEIGHTS_FILE = "policy.safetensors"
MANIFEST_FILE = "manifest.json"
PROMPT_BUCKET = 32  # prompt slots are a multiple of this, so that few shapes are compiled
EVAL_BATCH = 16
LIMITS = {"max_prompt": 256, "max_new": 320}  # in tokens; a policy's manifest may name others
CHAT_LIMITS = {"max_prompt": 1024, "max_new": 320}  # the spec language is explained in the prompt


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
    """A decoder with its tokenizer. `max_prompt` and `max_new` are in tokens; `chat` asks a pretrained model
    in its own form, without it the prompt is the bare task."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        tokenizer: TextTokenizer,
        *,
        max_prompt: int = LIMITS["max_prompt"],
        max_new: int = LIMITS["max_new"],
        chat: ChatPrompt | None = None,
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
        self.chat = chat
        self.fixed_choices: frozenset[str] = frozenset()  # see `within`
        self._prompt = chat or TaskPrompt(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Orchestrator:
        """A policy folder (weights, tokenizer, manifest), or a pretrained model: a folder in the hub's layout
        (config.json, safetensors, tokenizer.json) or a .gguf file. Raises LemonError naming what is damaged.
        """
        if path.suffix == ".gguf" or ((path / HUB_CONFIG).exists() and not (path / MANIFEST_FILE).exists()):
            return cls._pretrained(path)
        if not path.is_dir():
            raise LemonError(f"{path}: no such policy folder; train one with experiments/sft.py")
        manifest = read_manifest(path)
        packed = path / (WEIGHTS_FILE + PACKED)  # as policies under version control are kept
        weights = packed if packed.exists() else path / WEIGHTS_FILE
        decoder, config = load_weights(weights)
        tokenizer = load_tokenizer(path)
        chat = ChatPrompt.load(path, manifest, tokenizer) if manifest.get("prompt") == "chat" else None
        # A safetensors file carries no checksum of its own: a flipped byte would load as another number.
        found = {
            "params_sha256": (weights.name, params_sha256(decoder)),
            "tokenizer_sha256": (tokenizer.file, tokenizer.sha256),
        }
        if chat is not None:
            found["chat_template_sha256"] = (TEMPLATE_FILE, chat.sha256)
        for key, (name, digest) in found.items():
            if manifest.get(key, digest) != digest:
                raise LemonError(
                    f"{path / name}: {key} is {digest[:12]}…, the manifest says "
                    f"{str(manifest[key])[:12]}…; restore the folder or train the policy again"
                )
        limits = {name: manifest.get(name, default) for name, default in LIMITS.items()}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < PROMPT_BUCKET:
                raise LemonError(
                    f"{path / MANIFEST_FILE}: {name} is {value!r}, expected a whole number of tokens of at "
                    f"least {PROMPT_BUCKET}; restore the folder"
                )
        return cls(decoder, config, tokenizer, **limits, chat=chat)

    @classmethod
    def _pretrained(cls, path: Path) -> Orchestrator:
        decoder, config = load_pretrained(path)
        text = load_pretrained_text(path, config.vocab_size)
        chat = ChatPrompt(text.tokenizer, text.template)
        return cls(decoder, config, text.tokenizer, **CHAT_LIMITS, chat=chat)

    def with_decoder(self, decoder: Decoder) -> Orchestrator:
        """This policy with other parameters."""
        other = copy.copy(self)  # with what is known of the language already
        other.decoder = decoder
        return other

    def within(self, fixed_choices: Collection[str]) -> Orchestrator:
        """This policy, whose constrained specs are of the language without these choices (`spec.grammar`)."""
        if frozenset(fixed_choices) == self.fixed_choices:
            return self
        other = copy.copy(self)
        other.fixed_choices = frozenset(fixed_choices)
        for name in ("automaton", "constraint"):  # of the other language
            other.__dict__.pop(name, None)
        return other

    def save(self, folder: Path, manifest: dict[str, Any], *, dtype: str = "bfloat16") -> None:
        """Write a policy folder that `load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{WEIGHTS_FILE}.*{PART}"):  # of a save that was killed
            leftover.unlink()
        (folder / (WEIGHTS_FILE + PACKED)).unlink(missing_ok=True)  # it would be read instead
        save_weights(folder / WEIGHTS_FILE, self.decoder, self.config, dtype=dtype)  # type: ignore[arg-type]
        for name in (*TEXT_FILES, TEMPLATE_FILE):  # of another kind of policy that stood here
            (folder / name).unlink(missing_ok=True)
        self.tokenizer.save(folder)
        facts: dict[str, Any] = {
            "max_prompt": self.max_prompt,
            "max_new": self.max_new,
            "tokenizer_sha256": self.tokenizer.sha256,
        }
        if self.chat is not None:
            facts |= self.chat.save(folder)
        text = json.dumps(manifest | facts, indent=2, ensure_ascii=False) + "\n"
        replace_file(folder / MANIFEST_FILE, text)

    @cached_property
    def automaton(self) -> Automaton:
        """The spec language over the policy's tokens, in NumPy arrays.

        Raises LemonError if `max_new` is too small for the shortest spec.
        """
        automaton = spec_automaton(self.tokenizer, fixed=self.fixed_choices)
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
        """What the policy reads of a task; one too long for `max_prompt` loses its middle."""
        return self._prompt.ids(task_text, self.max_prompt)

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

        Constrained ones are all finished and strictly valid (`spec.grammar` says what they may hold). On the
        mesh of the decoder's parameters, if they lie on one; every host gets all rollouts.
        """
        decoder = decoder or self.decoder
        prompts = [self.prompt_ids(text) for text in task_texts]
        slots = prompt_slots or self.prompt_slots(task_texts)
        padded_NxP, lengths_N = pad(prompts, slots, self.tokenizer.pad_id)
        given = (decoder, padded_NxP, lengths_N, key)
        static: dict[str, Any] = {"group": group, "max_new": self.max_new, "temperature": temperature}
        static |= {"eos_ids": self.tokenizer.eos_ids}
        language = self.constraint.automaton if constrained else None
        with using(decoder):
            if language is not None:
                samples = sample_in_parts(sample_constrained, *given, language, **static)
            else:
                samples = sample_in_parts(sample, *given, **static)
        return self._rollouts(prompts, fetch(samples), group)

    def rollouts(self, task_texts: Sequence[str], samples: Samples, group: int) -> list[Rollout]:
        """What `write` gave for these tasks, of the `samples` (on the host) that it drew."""
        return self._rollouts([self.prompt_ids(text) for text in task_texts], samples, group)

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
