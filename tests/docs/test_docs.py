"""The documents agree with the code: names, examples, codes."""

import re
from pathlib import Path

import pytest

from lemon_jax.backends import parse_worker_file
from lemon_jax.backends.worker_keys import _KEYS
from lemon_jax.spec import ROLES, dump, parse_strict

CAPACITIES = "".join(f'[capacities.{c}]\nmodel = "m"\nprice = 1\n' for c in ("small", "medium", "large"))
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def read(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_spec_language_names_every_code_repair_and_role():
    text = read("spec_language.md")
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "lemon_jax" / "spec").glob("*.py"))
    assert set(re.findall(r"`(E_[A-Z_]+)`", text)) == set(re.findall(r'"(E_[A-Z_]+)"', source))
    repairs = set(re.findall(r'repair ?= ?"([a-z_]+)"', source)) | {"strip_fence", "strip_prose"}
    assert all(f"`{name}`" in text for name in repairs | set(ROLES))


def test_the_example_spec_is_canonical():
    (example,) = blocks(read("spec_language.md"), "yaml")
    assert dump(parse_strict(example)) == example


def test_worker_examples_are_valid_and_every_key_is_described():
    text = read("workers.md")
    examples = blocks(text, "toml")
    assert len(examples) == 6
    for example in examples:
        if "[models" not in example:  # keys of a model
            address = "" if "base_url" in example else 'base_url = "http://h/v1"\n'
            example = f'[models.m]\nbackend = "openai"\nmodel = "m"\n{address}{example}{CAPACITIES}'
        parse_worker_file(example, source="docs/workers.md", folder=DOCS)
    kinds = ("openai", "embedded", "simulated", "capacity")
    assert all(f"`{key}`" in text for kind in kinds for key in _KEYS[kind])


def test_the_map_names_every_module():
    text = read("architecture.md")
    modules = {p.name for p in (ROOT / "lemon_jax").rglob("*.py")} - {"__init__.py"}
    assert {name for name in modules if f"`{name}`" not in text} == set()
    named = set(re.findall(r"`([a-z_]+\.py)`", text))
    assert named <= modules | {p.name for p in (ROOT / "experiments").rglob("*.py")}


@pytest.mark.parametrize("path", [*DOCS.glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [t for t in targets if not (path.parent / t).exists()] == []
