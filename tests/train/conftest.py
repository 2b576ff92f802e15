"""Shared by the tests of training: each costs seconds to make and none of them is changed by a test."""

from __future__ import annotations

import pytest
from policy_helpers import learned_policy, make_tokenizer

import lemon_jax.spec_automaton


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def learned(tokenizer):
    """(policy, the losses of its training)."""
    losses: list[float] = []
    return learned_policy(tokenizer, losses), losses


@pytest.fixture(scope="session")
def policy(learned):
    return learned[0]


@pytest.fixture(scope="session", autouse=True)
def automata(tmp_path_factory):
    """Compiled once a session, and not kept in the user's cache."""
    folder = tmp_path_factory.mktemp("automata")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lemon_jax.spec_automaton, "cache_folder", lambda _: folder)
        yield
