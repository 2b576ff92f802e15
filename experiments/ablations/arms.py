"""The arms of the ablation: what each changes of the full method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lemon_jax.spec import FAMILIES, OPT_IN_FAMILIES
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.presets import without_counterfactuals, without_executed_edits

# Any key of RunConfig, of its update with a point, or `policy`: "random" for one that saw no spec.
Changes = Mapping[str, Any]


def _without(family: str) -> Changes:
    return {"edit_families": ",".join(name for name in FAMILIES if name != family)}


ARMS: dict[str, Changes] = {
    "full": {},
    "no-counterfactuals": {"edits_per_step": 0},
    "no-sft": {"policy": "random"},
    **{f"no-{family.replace('_', '-')}": _without(family) for family in FAMILIES},
    "no-capacity-choice": {"fixed_choices": "capacity"},
    "no-role-generation": {"fixed_choices": "role"},
    "no-structure-choice": {"fixed_choices": "structure"},
    "gradient-form": {"update.counterfactual_form": "gradient"},
    "no-common-random-numbers": {"common_random_numbers": False},
    "uniform-edits": {"edit_sampling": "uniform"},
    "predicted": {"predicted_edits": 16},
    "predicted-alone": {"predicted_edits": 16, "edits_per_step": 0},
    "all-families": {"edit_families": ",".join((*FAMILIES, *OPT_IN_FAMILIES))},
}


def config_of(arm: str, base: RunConfig, seed: int) -> RunConfig:
    """The configuration of an arm's run; an arm's `policy` is the caller's."""
    changes = dict(ARMS[arm])
    changes.pop("policy", None)
    prefix = "update."
    inner = {key.removeprefix(prefix): changes.pop(key) for key in list(changes) if key.startswith(prefix)}
    update: UpdateConfig = replace(base.update, **inner)
    config = replace(base, **changes, update=update, seed=seed)
    if ARMS[arm].get("edits_per_step") == 0:  # then nothing that the base sets for edits says anything
        return without_executed_edits(config) if config.predicted_edits else without_counterfactuals(config)
    return config
