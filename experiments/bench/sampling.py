"""Sampling 64 specs (8 tasks x 8) with the shipped policy, beside transformers' `generate` of the same one.

python experiments/bench/sampling.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import torch
from side_by_side import in_turn, machine, median, spread, versions
from transformers import AutoModelForCausalLM

from lemon_jax.bench.sample import generate as made_up
from lemon_jax.model import sample, sample_in_parts
from lemon_jax.model.sampling import prefill
from lemon_jax.orchestrator import Orchestrator, pad
from lemon_jax.policy_export import export_policy

POLICY = Path(__file__).resolve().parents[2] / "checkpoints" / "warmstart"
TASKS, GROUP, TEMPERATURE = 8, 8, 0.7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    policy = Orchestrator.load(POLICY)
    prompts = [policy.prompt_ids(task.prompt()) for task in made_up("number", TASKS, 0)]
    slots = -(-max(map(len, prompts)) // 32) * 32
    rows, lengths = pad(prompts, slots, policy.tokenizer.pad_id)
    counts: dict[str, list[int]] = {"lemon_jax": [], "transformers": []}

    def ours() -> object:
        samples = sample_in_parts(
            sample, policy.decoder, rows, lengths, jax.random.key(len(counts["lemon_jax"])),
            group=GROUP, max_new=policy.max_new, temperature=TEMPERATURE, eos_ids=policy.tokenizer.eos_ids,
        )  # fmt: skip
        counts["lemon_jax"].append(int(np.sum(samples.lengths_B)))
        return samples

    competitors = {"lemon_jax": ours, "transformers": torch_sampler(policy, prompts, counts["transformers"])}
    competitors |= prefills(policy, rows, lengths)
    print(machine())
    print(versions("jax", "flax", "torch", "transformers"))
    print(f"{TASKS} tasks x {GROUP} specs, at most {policy.max_new} tokens, temperature {TEMPERATURE}, fp32")
    seconds = in_turn(competitors, args.rounds)
    rate = {name: sum(counts[name][1:]) / sum(seconds[name]) for name in counts}  # the first call warms up
    for name in counts:
        print(f"{name}: {spread(seconds[name])}, {rate[name]:,.0f} tokens/s")
    print(f"generated tokens a second: {rate['lemon_jax'] / rate['transformers']:.1f} x (target 5)")
    together, apart = median(seconds["prefill of groups"]), median(seconds["prefill of each"])
    print(f"prefill of {TASKS} prompts, each for {GROUP} rows: {together:.3f} s; of every row: {apart:.3f} s")
    print(f"shared prompts: {apart / together:.1f} x (target 1.5)")


def torch_sampler(policy: Orchestrator, prompts: list[list[int]], counts: list[int]) -> Callable[[], object]:
    """transformers' own sampling of the exported policy, which ends when every row has."""
    with tempfile.TemporaryDirectory() as folder:
        export_policy(POLICY, Path(folder) / "hub")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "hub", dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    pad_id = policy.tokenizer.pad_id
    left = torch.tensor([[pad_id] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])

    def call() -> object:
        with torch.inference_mode():
            out = model.generate(
                left, attention_mask=mask, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
                num_return_sequences=GROUP, max_new_tokens=policy.max_new, pad_token_id=pad_id,
                eos_token_id=list(policy.tokenizer.eos_ids),
            )  # fmt: skip
        counts.append(int((out[:, longest:] != pad_id).sum()))
        return out

    return call


def prefills(policy: Orchestrator, rows: np.ndarray, lengths: np.ndarray) -> dict[str, Callable[[], object]]:
    """The prefill of each prompt once for its group, and of each row by itself."""
    run = jax.jit(prefill, static_argnames="group")
    many = np.repeat(rows, GROUP, axis=0), np.repeat(lengths, GROUP)

    def call(rows: np.ndarray, lengths: np.ndarray, group: int) -> Callable[[], object]:
        return lambda: jax.block_until_ready(run(policy.decoder, rows, lengths, group=group))

    return {"prefill of groups": call(rows, lengths, GROUP), "prefill of each": call(*many, 1)}


if __name__ == "__main__":
    main()
