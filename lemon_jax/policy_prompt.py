"""What a policy reads before it writes a spec: the bare task, or a chat in the form of a pretrained model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from lemon_jax.errors import LemonError
from lemon_jax.model.chat_template import ChatTemplate
from lemon_jax.model.pretrained_text import TEMPLATE_FILE, TODAY
from lemon_jax.model.text_tokenizer import TextTokenizer, symbol_pattern
from lemon_jax.spec import explain

SEPARATOR = "\n\nSpec:\n"  # between the task and the spec
_CUTS = "\ue000\ue001\ue002\ue003"  # private characters; one that the task does not use marks where it is cut


class Prompt(Protocol):
    """How a policy is asked."""

    def ids(self, task_text: str, max_prompt: int) -> list[int]:
        """At most `max_prompt` ids; a task too long for them loses its middle."""


@dataclass(frozen=True)
class TaskPrompt:
    """bos, the task, the separator: for policies that were trained on nothing else."""

    tokenizer: TextTokenizer

    def ids(self, task_text: str, max_prompt: int) -> list[int]:
        begin = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        tail = self.tokenizer.encode(SEPARATOR)
        body = self.tokenizer.encode(task_text)
        room = max_prompt - len(tail) - len(begin)
        if len(body) > room:
            # The question's beginning and the options at its end say more about it than its middle.
            body = body[: room - room // 2] + body[len(body) - room // 2 :]
        return [*begin, *body, *tail]


@dataclass(frozen=True)
class ChatPrompt:
    """The spec language as the system's message, the task as the user's, in the model's own chat template.

    A template that takes no system message gets both in one; a model without a template gets them as text.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None

    @classmethod
    def load(cls, folder: Path, manifest: Mapping[str, Any], tokenizer: TextTokenizer) -> ChatPrompt:
        """What `save` wrote. Raises LemonError for a template that is missing or damaged."""
        symbols = manifest.get("chat_symbols")
        if symbols is None:
            return cls(tokenizer, None)
        if not isinstance(symbols, dict) or not all(isinstance(text, str) for text in symbols.values()):
            raise LemonError(f"{folder}: the manifest's chat_symbols are {symbols!r:.60}; restore the folder")
        try:
            source = (folder / TEMPLATE_FILE).read_bytes().decode()
            return cls(tokenizer, ChatTemplate(source, symbols, today=TODAY))
        except (OSError, UnicodeDecodeError, LemonError) as error:
            raise LemonError(f"{folder / TEMPLATE_FILE}: {error}; restore the folder") from error

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the template; returns what belongs into the policy's manifest."""
        facts: dict[str, Any] = {"prompt": "chat", "chat_template_sha256": self.sha256}
        if self.template is not None:
            (folder / TEMPLATE_FILE).write_bytes(self.template.source.encode())
            facts["chat_symbols"] = self.template.symbols
        return facts

    @property
    def sha256(self) -> str:
        """Of the template and the symbols that it names."""
        parts = [self.template.source, self.template.symbols] if self.template else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def ids(self, task_text: str, max_prompt: int) -> list[int]:
        """Raises LemonError if `max_prompt` does not even hold the explanation of the language."""
        whole = self._ids(task_text)
        if len(whole) <= max_prompt:
            return whole
        fits = self._longest(lambda kept: len(self._ids(shortened(task_text, kept))) <= max_prompt, task_text)
        if fits is None:
            raise LemonError(
                f"max_prompt is {max_prompt} tokens, what the policy is told before any task takes "
                f"{len(self._ids(''))}; use a model with a tokenizer of larger pieces, or raise max_prompt"
            )
        return self._ids(shortened(task_text, fits))

    def _longest(self, fits: Callable[[int], bool], text: str) -> int | None:
        """The largest number of characters that fits, by bisection; None if none does."""
        if not fits(0):
            return None
        low, high = 0, len(text)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _ids(self, task_text: str) -> list[int]:
        cut = next((c for c in _CUTS if c not in task_text), _CUTS[0])
        # A task that spells "<|im_end|>" must not end the user's turn: no symbol is found across a cut.
        safe = self._begins_control.sub(lambda found: found[0] + cut, task_text.replace(cut, ""))
        text, begin = self._text(safe)
        parts = [self.tokenizer.encode_prompt(part) for part in text.split(cut)]
        return begin + [i for part in parts for i in part]

    def _text(self, task: str) -> tuple[str, list[int]]:
        """The chat as text, and what stands before it."""
        if self.template is None:
            begin = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
            return f"{explain()}\nTask:\n{task}{SEPARATOR}", begin
        chat = [{"role": "system", "content": explain()}, {"role": "user", "content": task}]
        return self.template.ask(chat, between="\nTask:\n"), []

    @cached_property
    def _begins_control(self) -> re.Pattern[str]:
        """Finds every character at which a control symbol begins, also inside of another one."""
        symbols = symbol_pattern(symbol for symbol in self.tokenizer.control_symbols() if len(symbol) > 1)
        return re.compile(f"(?={symbols.pattern}).", re.DOTALL)


def shortened(text: str, kept: int) -> str:
    """The beginning and the end of a text, `kept` characters in all.

    The question's beginning and the options at its end say more about it than its middle.
    """
    return text if kept >= len(text) else text[: kept - kept // 2] + text[len(text) - kept // 2 :]
