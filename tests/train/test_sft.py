import random
from collections import Counter

import jax
import numpy as np
import pytest
from policy_helpers import LEARNED, TASKS, optax_promotion, teacher_specs, untrained

from lemon_jax.errors import LemonError
from lemon_jax.model import params_sha256
from lemon_jax.spec import dump
from lemon_jax.train.sft import (
    COMPLETION_BUCKETS,
    PROMPT_BUCKETS,
    Example,
    SFTConfig,
    _bucket,
    batches,
    encode_examples,
    train,
)


def test_the_loss_falls_and_the_policy_writes_valid_specs(learned):
    policy, losses = learned
    assert len(losses) == 180
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(np.log(policy.tokenizer.vocab_size), rel=0.05)  # nats: uniform
    assert np.mean(losses[-10:]) < 0.05 * losses[0]
    rollouts = policy.write([t.prompt() for t in TASKS], jax.random.key(0), group=4)
    assert sum(r.valid for r in rollouts) >= len(rollouts) / 3
    assert {r.text for r in rollouts} & set(map(dump, LEARNED))


def test_it_is_deterministic(tokenizer):
    def run():
        policy = untrained(tokenizer, layers=1)
        examples = encode_examples(policy, [(t.prompt(), dump(s)) for t in TASKS for s in LEARNED])
        with optax_promotion():
            trained = train(policy, examples, SFTConfig(steps=2, batch=8))
        return params_sha256(policy.decoder), params_sha256(trained.decoder)

    first = run()
    assert run() == first
    assert first[0] != first[1]


def test_no_steps_leave_the_policy_as_it_was(tokenizer):
    policy = untrained(tokenizer)
    same = train(policy, [], SFTConfig(steps=0))
    assert params_sha256(same.decoder) == params_sha256(policy.decoder)


def _shape(e: Example) -> tuple[int, int]:
    return _bucket(len(e.prompt), PROMPT_BUCKETS), _bucket(len(e.completion), COMPLETION_BUCKETS)


def _examples(count: int = 100) -> list[Example]:
    rng = random.Random(0)
    return [
        Example(prompt=(1,) * rng.randint(1, 250), completion=(i + 10,) * rng.randint(1, 300))
        for i in range(count)
    ]


def test_a_batch_has_one_padded_shape_and_an_epoch_repeats_nothing():
    shapes = Counter(map(_shape, _examples(300)))
    examples = [e for e in _examples(300) if shapes[_shape(e)] >= 8]
    shapes = Counter(map(_shape, examples))
    stream = batches(examples, 8, random.Random(0))
    epoch = [next(stream) for _ in range(sum(n // 8 for n in shapes.values()))]
    for batch in epoch:
        assert len(batch) == 8
        assert len({_shape(e) for e in batch}) == 1
    seen = [e for batch in epoch for e in batch]
    assert len(seen) == len(set(seen))
    assert epoch != [next(stream) for _ in epoch]  # shuffled anew


def test_shapes_that_fill_no_batch_are_trained_on_with_others():
    """Three of the shortest shape, three of the longest, in between enough."""
    lengths = [(1, 1)] * 3 + [(100, 100)] * 8 + [(250, 300)] * 3
    examples = [Example(prompt=(1,) * p, completion=(i + 10,) * c) for i, (p, c) in enumerate(lengths)]
    stream = batches(examples, 4, random.Random(0))
    assert {e for _ in range(30) for e in next(stream)} == {*examples}


def test_batches_depend_on_the_seed_alone():
    def first(seed):
        stream = batches(_examples(), 4, random.Random(seed))
        return [next(stream) for _ in range(20)]

    assert first(0) == first(0) != first(1)


def test_too_few_examples_for_a_batch():
    with pytest.raises(LemonError, match="3 examples do not fill one batch of 8; use a smaller batch"):
        next(batches(_examples(3), 8, random.Random(0)))


def test_examples_end_with_the_end_token_and_fit_the_policy(tokenizer):
    policy = untrained(tokenizer, max_new=300)
    (example,) = encode_examples(policy, [(TASKS[0].prompt(), dump(LEARNED[0]))])
    assert example.completion[-1] == tokenizer.eos_id
    assert tokenizer.decode(example.completion[:-1]) == dump(LEARNED[0])
    assert example.prompt == tuple(policy.prompt_ids(TASKS[0].prompt()))
    longest = max(teacher_specs(30), key=len)
    with pytest.raises(LemonError, match="the policy writes at most 20"):
        encode_examples(untrained(tokenizer, max_new=20), [("task", longest)])


def test_a_loss_that_is_not_finite_stops_with_its_step(tokenizer):
    policy = untrained(tokenizer, layers=1)
    examples = encode_examples(policy, [(t.prompt(), dump(s)) for t in TASKS for s in LEARNED])
    config = SFTConfig(steps=4, batch=8, learning_rate=float("inf"), warmup=0)
    with optax_promotion(), pytest.raises(LemonError, match=r"warm start: the loss of step \d is nan"):
        train(policy, examples, config)
