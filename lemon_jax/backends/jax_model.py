"""A model file as a served model: weights, tokenizer and chat template. Imports JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lemon_jax.backends.engine_thread import ServedModel
from lemon_jax.backends.types import Message
from lemon_jax.compiled import compilation_cache_on_disk
from lemon_jax.model.chat_template import ChatTemplate
from lemon_jax.model.pretrained_text import load_pretrained_text
from lemon_jax.model.serving import ServingEngine, ServingShape
from lemon_jax.model.serving_weights import WeightType, load_serving_weights, open_source
from lemon_jax.model.text_tokenizer import TextTokenizer
from lemon_jax.precision import keep_float32

# Tokens of the pool for each slot. A request needs a few hundred; one that finds no room waits.
_POOL_TOKENS = 512
_PAGE = 64
# What llama.cpp falls back to where a file has no template of its own.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)


def load_jax_model(
    path: Path,
    *,
    slots: int,
    context: int,
    weights: WeightType,
    go_on: Callable[[], None] = lambda: None,
) -> ServedModel:
    """Load a GGUF model and compile its two steps. `context` is rounded up to whole pages.

    `go_on` is called before each part of the work: what it raises ends it. Raises `LemonError` for a file
    that is damaged or of an unknown family.
    """
    go_on()
    if weights == "float32":
        keep_float32()
    source = open_source(path)
    # Before the weights: what reading it takes for a while does not come on top of them.
    text = load_pretrained_text(path, source.config.vocab_size)
    tokenizer, template = text.tokenizer, text.template or ChatTemplate(_CHATML)
    most = -(-context // _PAGE)
    pages = max(slots * _POOL_TOKENS // _PAGE, most) + 1
    shape = ServingShape(slots=slots, context=most * _PAGE, pages=pages, page=_PAGE)
    engine = ServingEngine(load_serving_weights(source, weights, go_on), source.config, shape)
    with compilation_cache_on_disk():
        engine.warm_up(go_on)

    def prompt_ids(messages: Sequence[Message]) -> list[int]:
        return chat_ids(tokenizer, template, messages)

    return ServedModel(
        engine=engine,
        prompt_ids=prompt_ids,
        text_of=tokenizer.decode,
        eos_ids=tokenizer.eos_ids,
        context=shape.context,
    )


def chat_ids(tokenizer: TextTokenizer, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids of a chat whose next turn is the assistant's, as the model was trained on them."""
    # A lone surrogate has no bytes; a server would be sent a question mark too.
    chat = [{"role": m.role, "content": m.content.encode("utf-8", "replace").decode()} for m in messages]
    ids = tokenizer.encode_prompt(template.ask(chat))
    # Templates write their own beginning of text; some files ask for one beside it.
    bos_id = tokenizer.bos_id
    return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]
