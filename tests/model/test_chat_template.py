"""Chat templates against transformers' own rendering; templates that mean harm."""

import json
from datetime import datetime

import pytest
from real_models import NAMES, real_model
from small_tokenizers import tokenizer_json
from tokenizers import Tokenizer as Library

from lemon_jax.errors import LemonError
from lemon_jax.model.chat_template import MAX_SOURCE, ChatTemplate, RefusedByTemplate
from lemon_jax.model.gguf_file import GgufFile

SYMBOLS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be short.\n"}, {"role": "user", "content": '  "q" <b> & é \n'}],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
]
# Written for these tests; each uses what templates of one family use.
TEMPLATES = {
    "chatml": """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    "turns": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] | trim + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' ~ role ~ '\\n' ~ (first if loop.first else '') ~ message['content'] | trim -}}
    {{ '</turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<turn>model\\n' }}{%- endif -%}
""",
    "blocks": """\
{% set ns = namespace(count=0, names=[]) %}
{% if not tools is defined %}
{% set tools = none %}
{% endif %}
    {% for message in messages %}
        {# a comment of its own line #}
{% set ns.count = ns.count + 1 %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ message | tojson }}
{{ {'b': [1, none, true], 'a': '<é>'} | tojson(indent=2) }}
{% if loop.last %}{% generation %}last{{ message.content }}{% endgeneration %}{% endif %}
    {% if ns.count == 3 %}{% break %}{% endif %}
{% endfor %}
{% macro turn(name, text='') %}[{{ name }}:{{ text | default('none', true) }}]{% endmacro %}
{{ turn('a') }}{{ turn('b', messages[-1].content) }}{{ eos_token }}{{ unset_token }}
{{ '%s and %s' % (1, 'x') }}
{% for k, v in {'x': 1, 'y': 2}.items() %}{{ k }}={{ v }},{% endfor %}{{ range(3) | list }}{{ 'ab' * 2 }}
{{ 'a,b'.split(',') | join('+') }}{{ messages | map(attribute='role') | list }}{{ ' x '.strip() }}
{{ 'yes' if 'a' in 'abc' and messages is iterable else 'no' }} {{ strftime_now('%%') }}
{% if add_generation_prompt %}>{% endif %}
""",
}


DOUBLING = "{%% set n = namespace(x='aa') %%}{%% for i in 'x' * 99 %%}%s{%% endfor %%}"


def transformers_text(source, chat, generation, symbols):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'reference'")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Library.from_str(tokenizer_json("qwen")), chat_template=source, **symbols
    )
    return theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_the_text_is_that_of_transformers(name, generation):
    ours = ChatTemplate(TEMPLATES[name], SYMBOLS)
    for chat in CHATS:
        expected = transformers_text(TEMPLATES[name], chat, generation, SYMBOLS)
        assert ours.render(chat, add_generation_prompt=generation) == expected
    assert CHATS[0] == [{"role": "user", "content": "Hi"}]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_real_templates_as_transformers_renders_them(name):
    source = GgufFile(real_model(name)).metadata.get("tokenizer.chat_template")
    if source is None:
        pytest.skip(f"{NAMES[name]} has no chat template")
    for chat in CHATS:
        for generation in (True, False):
            ours = ChatTemplate(source, SYMBOLS).render(chat, add_generation_prompt=generation)
            assert ours == transformers_text(source, chat, generation, SYMBOLS)


def test_what_else_a_template_asks_for():
    source = "{{ strftime_now('%d %b %Y') }}{% if not enable_thinking | default(true) %} at once{% endif %}"
    template = ChatTemplate(source, today=datetime(2024, 7, 26))
    assert template.render(CHATS[0]) == "26 Jul 2024"
    assert template.render(CHATS[0], enable_thinking=False) == "26 Jul 2024 at once"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(CHATS[0]) >= "2025"


def test_a_known_text():
    text = ChatTemplate(TEMPLATES["chatml"], SYMBOLS).render(CHATS[0])
    assert text == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_may_refuse():
    template = ChatTemplate(TEMPLATES["turns"], SYMBOLS)
    with pytest.raises(RefusedByTemplate, match="roles must alternate"):
        template.render([CHATS[0][0], CHATS[0][0]])


THINKS = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
# As that of Mistral-7B-Instruct-v0.2.
ALTERNATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }} {% endfor %}" + THINKS
)


def test_a_reply_is_asked_for_without_thoughts_before_it():
    chatml = ChatTemplate(TEMPLATES["chatml"] + THINKS, SYMBOLS)
    assert chatml.ask(CHATS[1]) == chatml.render(CHATS[1]) + "<think>\n\n</think>\n\n"


def test_a_template_that_refuses_a_system_message_gets_it_in_the_users():
    template = ChatTemplate(ALTERNATE, SYMBOLS)
    end = "<think>\n\n</think>\n\n"
    assert template.ask(CHATS[0]) == "[user] Hi " + end
    assert template.ask(CHATS[2]) == "[user] S\n\none [assistant] two [user] three " + end
    assert template.ask(CHATS[2], between=" | ").startswith("[user] S | one [assistant]")
    with pytest.raises(RefusedByTemplate, match="roles must alternate"):
        template.ask([CHATS[0][0], CHATS[0][0]])
    with pytest.raises(RefusedByTemplate, match="roles must alternate"):
        template.ask([CHATS[2][0]])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}", "RecursionError"),
        (
            "{% set n = namespace(x='ab') %}{% for i in 'x' * 99 %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "text",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in 'x' * 99 %}{% set n.x = n.x + n.x %}{% endfor %}",
            "size",
        ),
        (
            "{% set n = namespace(x=[1]) %}{% for i in 'x' * 99 %}{% set n.x = n.x + n.x %}{% endfor %}",
            "size",
        ),
        (DOUBLING % "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}", "text"),
        (DOUBLING % "{% set n.x = [n.x, n.x] | join %}", "size"),
        (DOUBLING % "{% set n.x = n.x.replace('a', 'aa') %}", "size"),
        ("{{ 'a' * 10**9 }}", "size 1000000000"),
        ("{{ [0] * 10**9 }}", "size 1000000000"),
        ("{{ 10 ** (10 ** 10) }}", "size"),
        ("{{ '%999999999d' % 3 }}", "size"),
        ("{{ 'x' | center(10**9) }}", "width"),
        ("{{ 'x'.ljust(10**9) }}", "width"),
        ("{% for i in range(9000) %}{{ 'xxxxxxxxxxxx' * 99 }}{% endfor %}", "wrote more than"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update({'role': 'x'}) }}", "SecurityError"),
        ("{% include 'other' %}", "cannot be rendered"),
        ("{% import 'os' as os %}", "cannot be rendered"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for x in 5 %}{% endfor %}", "not iterable"),
    ],
)
def test_harm_is_one_clear_line(source, message):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(LemonError) as fault:
        ChatTemplate(source).render(messages)
    assert message in str(fault.value)
    assert str(fault.value).startswith("chat template: ")
    assert "\n" not in str(fault.value)
    assert messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{", "{% unknown %}", "{{ 1 | no_filter }}", "{% for %}" * 3, "x" * (MAX_SOURCE + 1)],
)
def test_a_template_that_does_not_compile(source):
    with pytest.raises(LemonError, match=r"^chat template: (does not compile|has \d+ characters)"):
        ChatTemplate(source)


@pytest.mark.parametrize("inside", ["'{0.__class__}'.format('')", "'a'.format.__self__"])
def test_nothing_leaks_from_formatting(inside):
    assert ChatTemplate("{{ " + inside + " }}").render(CHATS[0]) == ""


def test_the_bound_counts_each_rendering_anew():
    template = ChatTemplate("{% for i in range(20000) %}{% endfor %}{{ messages | length }}")
    assert [template.render(CHATS[0]) for _ in range(4)] == ["1"] * 4


def test_json_is_not_escaped_for_html():
    text = ChatTemplate("{{ messages[0] | tojson }}").render([{"role": "user", "content": "<é>'"}])
    assert json.loads(text) == {"role": "user", "content": "<é>'"}
    assert "<é>'" in text
