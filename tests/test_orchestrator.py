import json
import shutil

import jax
import numpy as np
import pytest
from policy_helpers import TASKS, make_tokenizer, untrained

from lemon_jax.errors import LemonError
from lemon_jax.model import params_sha256, train_tokenizer
from lemon_jax.orchestrator import (
    EVAL_BATCH,
    MANIFEST_FILE,
    PROMPT_BUCKET,
    SEPARATOR,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Orchestrator,
    pad,
)
from lemon_jax.spec import parse

TEXTS = [t.prompt() for t in TASKS]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer):
    return untrained(tokenizer, max_new=32, layers=1)


@pytest.fixture
def folder(policy, tmp_path):
    policy.save(tmp_path / "policy", {"kind": "test"}, dtype="float32")
    return tmp_path / "policy"


def test_a_policy_folder_gives_the_policy_back(policy, folder):
    again = Orchestrator.load(folder)
    assert params_sha256(again.decoder) == params_sha256(policy.decoder)
    assert (again.max_prompt, again.max_new) == (policy.max_prompt, policy.max_new)
    assert again.tokenizer.sha256 == policy.tokenizer.sha256
    assert json.loads((folder / MANIFEST_FILE).read_text())["kind"] == "test"


@pytest.mark.parametrize("name", [MANIFEST_FILE, WEIGHTS_FILE, TOKENIZER_FILE])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_missing_or_damaged_file_is_named(folder, name, damage):
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
    with pytest.raises(LemonError) as fault:
        Orchestrator.load(folder)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    "facts", ["[]", '"x"', '{"max_new": "many"}', '{"max_prompt": null}', '{"max_new": 0}']
)
def test_a_manifest_that_says_nonsense_is_named(folder, facts):
    (folder / MANIFEST_FILE).write_text(facts)
    with pytest.raises(LemonError, match=r"manifest\.json"):
        Orchestrator.load(folder)


def test_no_such_folder(tmp_path):
    with pytest.raises(LemonError, match=r"no such policy folder; train one with experiments/sft\.py"):
        Orchestrator.load(tmp_path / "nothing")


def test_the_tokenizer_of_another_policy(folder, tmp_path):
    other = train_tokenizer(["another text, of other words"] * 3, tmp_path / "other.model", 300)
    shutil.copy(tmp_path / "other.model", folder / TOKENIZER_FILE)
    with pytest.raises(LemonError, match=r"tokenizer\.model: tokenizer_sha256 is"):
        Orchestrator.load(folder)
    small = untrained(other)
    with pytest.raises(LemonError, match="the policy has a vocabulary of"):
        Orchestrator(small.decoder, small.config, make_tokenizer())


def test_a_prompt_is_the_task_and_the_separator(policy):
    ids = policy.prompt_ids(TEXTS[0])
    assert ids[0] == policy.tokenizer.bos_id
    assert policy.tokenizer.decode(ids[1:]) == TEXTS[0] + SEPARATOR


def test_a_long_task_loses_its_middle(policy):
    text = "Begin. " + "filler " * 200 + "A) 3\nB) 4"
    ids = policy.prompt_ids(text)
    assert len(ids) == policy.max_prompt
    shown = policy.tokenizer.decode(ids[1:])
    assert shown.startswith("Begin. filler")
    assert shown.endswith("B) 4" + SEPARATOR)


def test_prompt_slots_are_few(policy):
    slots = policy.prompt_slots(TEXTS)
    assert slots % PROMPT_BUCKET == 0
    assert slots - PROMPT_BUCKET < max(len(policy.prompt_ids(t)) for t in TEXTS) <= slots


def test_rollouts_hold_the_sampled_ids(policy):
    key = jax.random.key(3)
    rollouts = policy.write(TEXTS[:3], key, group=2)
    assert len(rollouts) == 6
    for i, r in enumerate(rollouts):
        assert r.prompt_ids == tuple(policy.prompt_ids(TEXTS[i // 2]))
        assert len(r.token_ids) == len(r.log_probs) <= policy.max_new
        assert r.finished == (r.token_ids[-1] == policy.tokenizer.eos_id)
        assert r.parsed == parse(policy.tokenizer.decode(r.token_ids))
        assert max(r.log_probs) <= 0
        assert not r.valid
    assert rollouts == policy.write(TEXTS[:3], key, group=2)
    assert rollouts != policy.write(TEXTS[:3], jax.random.key(4), group=2)
    assert len({r.token_ids for r in rollouts}) == 6


def test_greedy_specs_do_not_depend_on_how_many_there_are(policy):
    texts = [f"{t} {i}" for i, t in enumerate(TEXTS * 3)][: EVAL_BATCH + 3]
    slots = policy.prompt_slots(texts)
    many = policy.write_greedy(texts, prompt_slots=slots)
    assert len(many) == len(texts)
    assert policy.write_greedy(texts[EVAL_BATCH:], prompt_slots=slots) == many[EVAL_BATCH:]
    assert policy.write_greedy([]) == []


def test_another_decoder_may_write_for_the_policy(policy, tokenizer):
    other = untrained(tokenizer, seed=1, max_new=32, layers=1)
    key = jax.random.key(0)
    assert policy.write(TEXTS[:3], key, group=2, decoder=other.decoder) == other.write(
        TEXTS[:3], key, group=2
    )


def test_rows_that_do_not_fit_are_refused():
    ids, lengths = pad([[1, 2], [], [3]], 3, 9)
    np.testing.assert_array_equal(ids, [[1, 2, 9], [9, 9, 9], [3, 9, 9]])
    np.testing.assert_array_equal(lengths, [2, 0, 1])
    with pytest.raises(ValueError, match="row 1 has 4 tokens, there are 3 slots"):
        pad([[1], [1, 2, 3, 4]], 3, 0)
