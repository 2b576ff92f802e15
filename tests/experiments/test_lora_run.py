"""Flags for low-rank adapters in the main job; a pretrained policy with its chat template in another tool."""

import json

import numpy as np
import pytest
from experiment_helpers import run_main, script
from pretrained_policy_helpers import write_hub_model

from lemon_jax.cli import main as lemon
from lemon_jax.orchestrator import Orchestrator

TASK = "A train goes 60 miles in 2 hours. How fast is it?"


def test_the_flags_reach_the_configuration():
    run = script("run")

    def config(*flags):
        return run._config(run.parse_arguments(["--bench", "aqua", *flags]))[0]

    assert config().lora_rank == 0
    wanted = config("--lora-rank", "4", "--lora-targets", "q,v")
    assert (wanted.lora_rank, wanted.lora_targets) == (4, "q,v")
    assert wanted.sha256() != config("--lora-rank", "4").sha256()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-rank", 2, "--lora-targets", "qkv"), "lora-targets has 'qkv', expected some of q, k, v, o"),
        (("--lora-targets", "q"), "lora-targets without lora-rank has no effect"),
        (("--lora-rank", -1), "lora-rank is -1, it must be at least 0"),
    ],
)
def test_flags_that_make_no_sense(flags, message, tmp_path, capsys):
    assert run_main("--bench", "aqua", "--out", tmp_path / "run", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_policy_that_chats_is_exported_with_its_template(tmp_path):
    policy = Orchestrator.load(write_hub_model(tmp_path / "tiny-qwen2"))
    policy.save(tmp_path / "run" / "policy", {}, dtype="float32")
    hub = tmp_path / "hub"
    assert lemon(["export", str(tmp_path / "run"), "--format", "hub", "--out", str(hub)]) == 0
    assert json.loads((hub / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    again = Orchestrator.load(hub)
    assert again.prompt_ids(TASK) == policy.prompt_ids(TASK)
    assert again.tokenizer.eos_ids == policy.tokenizer.eos_ids

    pytest.importorskip("torch", reason="the extra 'reference' (torch, transformers) is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'reference' is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(hub)
    assert theirs.chat_template == policy.chat.template.source
    text, _ = policy.chat._text(TASK)
    assert theirs(text)["input_ids"] == policy.prompt_ids(TASK)
    model = transformers.AutoModelForCausalLM.from_pretrained(hub)
    weight = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    ours = np.asarray(policy.decoder.layers[1].attention.q[...])
    np.testing.assert_array_equal(weight.T.reshape(ours.shape), ours)
    assert model.config.eos_token_id == list(policy.tokenizer.eos_ids)
