"""A model's own chat template, rendered as transformers renders it; a template is code from a stranger."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lemon_jax.errors import LemonError

MAX_SOURCE = 1 << 18  # characters; the longest templates in use have some ten thousand
MAX_STEPS = 50_000  # turns of loops and calls in one rendering
MAX_TEXT = 1 << 22  # characters of a text, items of a list, bits of a number that an operator makes
NO_THOUGHTS = {"enable_thinking": False}  # as Qwen3's template calls it; others do not ask


class RefusedByTemplate(LemonError):
    """The template called raise_exception: these messages are not what it was made for."""


class ChatTemplate:
    """A compiled template. `symbols` are the texts it may name: bos_token, eos_token, pad_token, unk_token.

    `today` is the time that the template is told; without it the present. Raises `LemonError` for a template
    that does not compile.
    """

    def __init__(
        self, source: str, symbols: Mapping[str, str] | None = None, *, today: datetime | None = None
    ):
        if len(source) > MAX_SOURCE:
            raise LemonError(f"chat template: has {len(source)} characters, expected at most {MAX_SOURCE}")
        self.source = source
        self.symbols = dict(symbols or {})
        self._environment = _Environment(today)
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise LemonError(
                f"chat template: does not compile ({_line(error)}); fetch the model again"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of these messages ({"role", "content"}), as `apply_chat_template(tokenize=False)` has it.

        `variables` are what else the template may ask for, such as `enable_thinking`.
        Raises `RefusedByTemplate` where the template refuses the messages, `LemonError` where it fails,
        does what the sandbox forbids, or works without end.
        """
        self._environment.steps = 0
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                # Copies: a template may not change what the caller holds.
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.symbols,
                **variables,
            ):
                size += len(part)
                if size > MAX_TEXT:
                    raise _Endless(f"it wrote more than {MAX_TEXT} characters")
                parts.append(part)
        except _Refusal as error:
            raise RefusedByTemplate(f"chat template: refuses the messages ({_line(error)})") from error
        except Exception as error:  # whatever the code of a stranger raises
            raise LemonError(
                f"chat template: cannot be rendered ({type(error).__name__}: {_line(error)}); fetch the "
                "model again, or use another one"
            ) from error
        return "".join(parts)

    def ask(self, messages: Sequence[Mapping[str, Any]], *, between: str = "\n\n") -> str:
        """The text of these messages with the reply to come, which is the answer and no thoughts before it.

        A template that refuses a system's message before the user's gets one of the user's: both texts,
        `between` them. Raises as `render`.
        """
        try:
            return self.render(messages, **NO_THOUGHTS)
        except RefusedByTemplate:
            if [message["role"] for message in messages[:2]] != ["system", "user"]:
                raise
            system, user, *later = messages
            both = {"role": "user", "content": f"{system['content']}{between}{user['content']}"}
            return self.render([both, *later], **NO_THOUGHTS)


class _Refusal(jinja2.TemplateError):
    pass


class _Endless(Exception):
    pass


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, with a bound on what a rendering may do."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, today: datetime | None) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.steps = 0
        self.filters["tojson"] = _tojson
        self.filters["counted"] = self._counted
        self.filters["joined"] = self._joined
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: (today or datetime.now()).strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template's tree, each loop counted, each `~` and each `{{ }}` measured."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        parents: list[Any] = [*tree.find_all(nodes.Concat), *tree.find_all(nodes.Output)]
        for parent in parents:
            parent.nodes = [
                part
                if isinstance(part, nodes.TemplateData)
                else nodes.Filter(part, "joined", [], [], None, None, lineno=part.lineno)
                for part in parent.nodes
            ]
        tree.set_environment(self)
        return tree

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _Endless(f"it takes more than {MAX_STEPS} steps")

    def _counted(self, items: Any) -> Iterable[Any]:
        # Something with a length keeps it: templates ask for loop.last and loop.length.
        return _Counted(items, self._step) if hasattr(items, "__len__") else self._one_by_one(items)

    def _one_by_one(self, items: Any) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _joined(self, value: Any) -> Any:
        self._step()
        if isinstance(value, str) and len(value) > MAX_TEXT // 8:
            raise _Endless(f"it makes a text of {len(value)} characters")
        return value

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        _check_widths((*args, *kwargs.values()))
        return _measured(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._step()
        if (size := _result_size(operator, left, right)) > MAX_TEXT:
            raise _Endless(f"{operator} makes a value of size {size}")
        return super().call_binop(context, operator, left, right)


class _Counted:
    """Something with a length whose reading is counted."""

    def __init__(self, items: Any, step: Callable[[], None]):
        self._items, self._step = items, step

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._step()
            yield item


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training on whole chats; the text is unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """About how large the result will be: characters, items, or bits of a number."""
    sizes = [len(v) if isinstance(v, (str, list, tuple)) else None for v in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    if operator == "*":
        size = next((s for s in sizes if s is not None), None)
        times = next((v for v in (left, right) if isinstance(v, int)), 0)
        return max(times, 0) * size if size is not None else sum(_bits(v) for v in (left, right))
    if operator == "**":
        return _bits(left) * right if isinstance(left, int) and isinstance(right, int) else 0
    # "%": formatting may pad to any width.
    return MAX_TEXT + 1 if isinstance(left, str) and any(c.isdigit() or c == "*" for c in left) else 0


def _check_widths(arguments: Iterable[Any]) -> None:
    if any(isinstance(value, int) and value > MAX_TEXT for value in arguments):
        raise _Endless("it asks for a text of boundless width")


def _measured(value: Any) -> Any:
    if isinstance(value, (str, list, tuple, dict)) and len(value) > MAX_TEXT:
        raise _Endless(f"it makes a value of size {len(value)}")
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # with the marks by which Jinja knows what to pass
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name in ("center", "indent", "wordwrap"):
            _check_widths((*args, *kwargs.values()))
        return _measured(function(*args, **kwargs))

    return bounded


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own filter writes HTML's escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(str(message))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
