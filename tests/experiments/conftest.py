"""A policy folder, an offline environment, and signal handlers put back."""

from __future__ import annotations

import signal

import pytest
from experiment_helpers import child_environment, offline
from policy_helpers import learned_policy, make_tokenizer

from lemon_jax.model import params_sha256


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A tiny policy that mostly writes valid specs, saved as `checkpoints/warmstart` is."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    policy = learned_policy(make_tokenizer())
    policy.save(folder, {"kind": "test", "params_sha256": params_sha256(policy.decoder)}, dtype="float32")
    return folder


@pytest.fixture(scope="session")
def child_env(tmp_path_factory):
    """Environment of child processes; they share what JAX has compiled."""
    return child_environment(tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("compiled"))


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch):
    """No data, no network, no recordings; the working folder is the test's own."""
    monkeypatch.delenv("LEMON_DATA", raising=False)
    for name, value in offline(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
