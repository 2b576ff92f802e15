"""A batch in parts gives the samples of the whole batch."""

import jax
import numpy as np
import pytest
from model_helpers import random_decoder, random_prompts

from lemon_jax.model import sample, sample_in_parts, sampling_parts
from lemon_jax.model.sampling_parts import count_parts

STATIC = {"group": 2, "max_new": 6, "temperature": 0.8, "eos_ids": (-1,)}


@pytest.mark.parametrize(
    ("prompts", "group", "parts"), [(8, 8, 2), (8, 4, 1), (6, 16, 3), (7, 16, 1), (1, 64, 1), (8, 64, 8)]
)
def test_parts_are_equal_and_not_small(prompts, group, parts):
    assert count_parts(prompts, group) == parts


def test_parts_draw_what_the_whole_batch_draws(monkeypatch):
    monkeypatch.setattr(sampling_parts, "PART_ROWS", 4)
    prompts = random_prompts(np.random.default_rng(0), [6, 1, 4, 3], slots=6)
    given = (random_decoder(), *map(np.asarray, prompts), jax.random.key(3))
    starts = []

    def run(*args, **static):
        starts.append(static["first_row"])
        return sample(*args, **static)

    parts = sample_in_parts(run, *given, **STATIC)
    assert sorted(starts) == [0, 4]
    whole = jax.device_get(sample(*given, **STATIC))
    assert (parts.tokens_BxC == whole.tokens_BxC).all()
    assert (parts.lengths_B == whole.lengths_B).all()
    np.testing.assert_allclose(parts.log_probs_BxC, whole.log_probs_BxC, atol=1e-4)
