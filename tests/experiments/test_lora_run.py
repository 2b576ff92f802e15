"""Flags for low-rank adapters in the main job; a pretrained policy with its chat template in another tool."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from experiment_helpers import json_lines, run_main, script
from pretrained_policy_helpers import write_hub_model

from lemon_jax.cli import main as lemon
from lemon_jax.model import named_params, params_sha256
from lemon_jax.orchestrator import CHAT_LIMITS, Orchestrator
from lemon_jax.train.trainer import Trainer

TASK = "A train goes 60 miles in 2 hours. How fast is it?"


def test_the_flags_reach_the_configuration():
    flags_of = script("run_arguments")

    def config(*flags):
        return flags_of.config_of(flags_of.parse_arguments(["--bench", "aqua", *flags]))[0]

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


def test_adapters_are_trained_resumed_merged_and_read_elsewhere(tmp_path, monkeypatch):
    """A random model of its own layout: a run stopped after its first step ends as one that never stopped."""
    monkeypatch.setitem(CHAT_LIMITS, "max_new", 96)  # so that the test is short
    model = write_hub_model(tmp_path / "tiny-qwen2")
    flags = ("--bench", "aqua", "--workers", "scripted", "--policy", model, "--constrained", "--lora-rank", 2)
    flags += ("--steps", 2, "--tasks-per-step", 1, "--group", 2, "--eval-tasks", 1, "--baselines", "none")
    assert run_main(*flags, "--out", tmp_path / "whole") == 0
    step = Trainer._step

    async def stopped_after(trainer, number):
        metrics = await step(trainer, number)
        trainer.hosts.stop()  # as SIGTERM does
        return metrics

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_step", stopped_after)
        assert run_main(*flags, "--out", tmp_path / "run") == 75
    assert len(json_lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert run_main("--resume", tmp_path / "run") == 0

    folders = (model, tmp_path / "whole" / "policy", tmp_path / "run" / "policy")
    first, whole, run = (Orchestrator.load(folder) for folder in folders)
    assert params_sha256(run.decoder) == params_sha256(whole.decoder)
    assert params_sha256(run.decoder) != params_sha256(first.decoder)
    assert not [name for name in named_params(run.decoder) if "lora" in name]

    hub = tmp_path / "hub"
    assert lemon(["export", str(tmp_path / "run"), "--format", "hub", "--out", str(hub)]) == 0
    torch = pytest.importorskip(
        "torch", reason="the extra 'reference' (torch, transformers) is not installed"
    )
    transformers = pytest.importorskip("transformers", reason="the extra 'reference' is not installed")
    ids = run.prompt_ids(TASK)[:64]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(hub)(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits(run, ids), theirs, atol=1e-4)
    assert np.abs(logits(first, ids) - theirs).max() > 0


def logits(policy, ids):
    tokens, length = jnp.asarray([ids]), len(ids)
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    hidden, _ = policy.decoder(tokens, jnp.arange(length)[None], mask)
    return np.asarray(policy.decoder.logits(hidden[0]))
