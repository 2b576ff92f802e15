"""The same update in PyTorch, as GRPO trainers on transformers models compute it; update.py times it.

Logits of the completion only, log-probabilities by gather and logsumexp (TRL's `selective_log_softmax`), the
reference without gradient, the clipped loss with the k3 estimator, the preference loss on the edited spans,
AdamW without decay after clipping by global norm; attention by PyTorch's own fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lemon_jax.model import DecoderConfig
from lemon_jax.train.batch import UpdateBatch, micro_batches
from lemon_jax.train.config import UpdateConfig


def llama(config: DecoderConfig) -> LlamaForCausalLM:
    """A transformers model of these sizes; its weights are random, which costs the same time."""
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_embeddings,
        rms_norm_eps=config.norm_eps,
    )
    model = LlamaForCausalLM(sizes).float()
    model.set_attn_implementation("sdpa")
    return model


def log_probs(model: LlamaForCausalLM, rows: torch.Tensor, steps: int, temperature: float) -> torch.Tensor:
    """Log-probabilities of the last `steps` tokens of full rows [B, T]."""
    logits = model(input_ids=rows, logits_to_keep=steps + 1, use_cache=False).logits[:, :-1] / temperature
    chosen = torch.gather(logits, -1, rows[:, -steps:, None])[..., 0]
    return chosen - torch.logsumexp(logits, dim=-1)


def step_loss(
    model: LlamaForCausalLM, reference: LlamaForCausalLM, batch: UpdateBatch, settings: UpdateConfig
) -> torch.Tensor:
    """The loss of a batch of full-length rows, as `lemon_jax.train.update.total_loss` defines it."""
    tensor = {name: torch.from_numpy(np.asarray(value)) for name, value in batch._asdict().items()}
    source, edited = tensor["source_K"].long(), tensor["edited_completions_KxC"]
    prompts, completions = tensor["prompts_BxP"], tensor["completions_BxC"]
    rows = torch.cat([torch.cat([prompts, completions], 1), torch.cat([prompts[source], edited], 1)]).long()
    count, steps = completions.shape
    scores = log_probs(model, rows, steps, settings.temperature)
    with torch.no_grad():
        reference_scores = log_probs(reference, rows[:count], steps, settings.temperature)
    own = scores[:count]
    ratio = torch.exp(own - tensor["old_log_probs_BxC"])
    bounded = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    advantages = tensor["advantages_B"][:, None]
    policy = -torch.minimum(ratio * advantages, bounded * advantages)
    gap = torch.clamp(reference_scores - own, -20, 20)
    per_token = policy + settings.kl * (torch.exp(gap) - gap - 1)
    at = torch.arange(steps)[None]
    spans = []
    for values, last in ((own[source], "last_K"), (scores[count:], "edited_lengths_K")):
        inside = (at >= tensor["first_K"][:, None]) & (at < tensor[last][:, None])
        spans.append((values * inside).sum(1) / inside.sum(1).clamp(min=1))
    contrast = tensor["contrast_K"]
    margin = torch.sign(contrast) * settings.tau * (spans[0] - spans[1])
    preference = -contrast.abs() * torch.nn.functional.logsigmoid(margin) * tensor["weight_K"]
    return per_token.sum() + settings.counterfactual * preference.sum()


def torch_step(
    config: DecoderConfig, settings: UpdateConfig, batch: UpdateBatch, parts: int
) -> Callable[[], object]:
    """A call that makes one update, its rows in `parts` micro-batches."""
    model, reference = llama(config), llama(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, (0.9, 0.95), weight_decay=0)
    stacked = micro_batches(batch, parts)
    pieces = [UpdateBatch(*(x[part] for x in stacked)) for part in range(parts)]
    tokens = float(np.sum(batch.lengths_B))

    def step() -> object:
        optimizer.zero_grad()
        for piece in pieces:
            (step_loss(model, reference, piece, settings) / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        return float(norm)

    return step
