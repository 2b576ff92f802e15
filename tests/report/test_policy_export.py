"""`lemon export --format hub`: a policy folder and a run's policy, read back with the same parameters."""

import numpy as np
import pytest
from policy_helpers import make_tokenizer, untrained

from lemon_jax.cli import main
from lemon_jax.model import load_pretrained, named_params


@pytest.fixture(scope="module")
def policy():
    return untrained(make_tokenizer())


@pytest.mark.parametrize("inside", ["", "policy"])
def test_a_policy_is_written_for_other_tools(policy, inside, tmp_path, capsys):
    policy.save(tmp_path / "run" / inside, {}, dtype="float32")
    assert main(["export", str(tmp_path / "run"), "--format", "hub", "--out", str(tmp_path / "hub")]) == 0
    assert "for transformers and vLLM" in capsys.readouterr().out
    decoder, config = load_pretrained(tmp_path / "hub")
    assert config == policy.config
    for name, value in named_params(decoder).items():
        assert np.array_equal(value, named_params(policy.decoder)[name]), name
    names = {path.name for path in (tmp_path / "hub").iterdir()}
    assert {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names


def test_faults(policy, tmp_path, capsys):
    words = ["export", str(tmp_path), "--format", "hub", "--out", str(tmp_path / "hub")]
    assert main(words) == 2
    assert "holds no trained policy" in capsys.readouterr().err
    assert main([*words, "--method", "x"]) == 2
    assert "--method and --data" in capsys.readouterr().err
    policy.save(tmp_path / "policy", {})
    assert main([*words[:-1], str(tmp_path / "policy")]) == 2
    assert "expected a folder that is empty" in capsys.readouterr().err
