"""Presets: TOML files with the fields of RunConfig, and tables that override them for one bench."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lemon_jax.bench import SOURCES
from lemon_jax.errors import LemonError
from lemon_jax.spec import CAPACITIES, CHOICES, FAMILIES, OPT_IN_FAMILIES, baseline_names
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.rewards import RewardConfig

_NESTED = {"update": UpdateConfig, "reward": RewardConfig}
_WORDS = {
    name: get_args(kind)
    for table in (*_NESTED.values(), RunConfig)
    for name, kind in get_type_hints(table).items()
    if get_origin(kind) is Literal
}
_COUNTS = (
    "steps",
    "tasks_per_step",
    "group",
    "edits_per_step",
    "edits_per_rollout",
    "contrast_samples",
    "updates_per_step",
    "eval_tasks",
    "checkpoint_every",
    "search_candidates",
    "search_tokens",
    "lora_rank",
    "dynamic_sampling",
    "predicted_edits",
)
# What only executed edits read, and what only edits do, predicted ones too (of the update).
_OF_EDITS = (
    "edits_per_rollout",
    "contrast_samples",
    "noise_gate",
    "common_random_numbers",
    "edit_families",
    "edit_sampling",
)
_OF_CREDIT = ("counterfactual", "counterfactual_form", "tau", "normalise_spans")


def load_preset(path: Path, bench: str) -> RunConfig:
    """The configuration of a preset file for a bench; for several benches that of no bench's own table.

    Raises:
        LemonError: the file cannot be read, or all its faults by key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.toml")))
        raise LemonError(f"{path}: no such preset; there are {known or 'none'}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LemonError(f"{path}: not a TOML file ({error})") from error
    faults: list[str] = []
    per_bench = data.pop("bench", {})
    if not isinstance(per_bench, dict) or not all(isinstance(v, dict) for v in per_bench.values()):
        raise LemonError(f"{path}: bench must hold tables such as [bench.aqua]")
    config = _apply(RunConfig(bench=bench, preset=path.stem), data, "", faults)
    for name, values in per_bench.items():
        if name not in SOURCES:
            faults.append(f"unknown table bench.{name}, expected one of {', '.join(SOURCES)}")
        overridden = _apply(config, values, f"bench.{name}.", faults)
        if name == bench:
            config = overridden
    if faults:
        raise LemonError(f"{path}: {'; '.join(faults)}")
    return config


def without_counterfactuals(config: RunConfig) -> RunConfig:
    """The run by GRPO alone. What only counterfactuals read is as by default: there it says nothing."""
    update = replace(config.update, **{name: getattr(UpdateConfig, name) for name in _OF_CREDIT})
    return replace(without_executed_edits(config), predicted_edits=0, update=update)


def without_executed_edits(config: RunConfig) -> RunConfig:
    """The run with predicted edits alone. What only executed ones read is as by default."""
    return replace(config, edits_per_step=0, **{name: getattr(RunConfig, name) for name in _OF_EDITS})


def with_values(config: RunConfig, *values: dict[str, Any]) -> RunConfig:
    """The configuration changed by values as a preset has them. Raises LemonError with all their faults."""
    faults: list[str] = []
    for some in values:
        config = _apply(config, some, "", faults)
    if faults:
        raise LemonError("; ".join(faults))
    return config


def check_counts(config: RunConfig) -> None:
    """Raise LemonError for numbers that no run can have, and for options that can have no effect."""
    low = {
        "steps": 0,
        "edits_per_step": 0,
        "group": 2,
        "search_candidates": 2,
        "search_tokens": 0,
        "lora_rank": 0,
        "dynamic_sampling": 0,
        "predicted_edits": 0,
    }

    faults = [
        f"{name.replace('_', '-')} is {getattr(config, name)}, it must be at least {low.get(name, 1)}"
        for name in _COUNTS
        if getattr(config, name) < low.get(name, 1)
    ]
    if config.edits_per_step > config.specs_per_step * max(1, config.edits_per_rollout):
        faults.append(
            f"edits-per-step is {config.edits_per_step}, "
            f"a step has only {config.specs_per_step} specs to edit, "
            f"each {config.edits_per_rollout} times at most (edits-per-rollout)"
        )
    if config.best_fixed and not config.steps and not config.search_tokens:
        faults.append(
            "best-fixed searches with as many worker tokens as the training used, and steps is 0; "
            "give search-tokens"
        )
    if config.overlap and config.dynamic_sampling:
        faults.append(
            "overlap and dynamic-sampling exclude each other: replacements would be sampled while the "
            "parameters change; give one of them"
        )
    if config.search_tokens and not config.best_fixed:
        faults.append(f"search-tokens is {config.search_tokens} without best-fixed; give both or neither")
    named = [name.strip() for name in config.edit_families.split(",")]
    if len({*named}) < len(named) or not {*named} <= {*FAMILIES, *OPT_IN_FAMILIES}:
        faults.append(
            f"edit-families is {config.edit_families!r}, expected some of "
            f"{', '.join((*FAMILIES, *OPT_IN_FAMILIES))}, each once"
        )
    faults += _contrast_faults(config) + _choice_faults(config) + _idle_faults(config)
    try:
        baseline_names(config.baselines)
    except LemonError as fault:
        faults.append(str(fault))
    faults += _bench_faults(config) + _price_faults(config) + _lora_faults(config)
    if not 0 <= config.seed < 2**32:
        faults.append(f"seed is {config.seed}, it must be from 0 to {2**32 - 1}")
    update = config.update
    for name in ("learning_rate", "clip_norm", "clip_low", "clip_high", "truncate", "temperature"):
        if not 0 < getattr(update, name) < math.inf:
            faults.append(f"update.{name} is {getattr(update, name)}, it must be positive and finite")
    for name in ("kl", "counterfactual", "tau"):
        if not 0 <= getattr(update, name) < math.inf:
            faults.append(f"update.{name} is {getattr(update, name)}, it must be finite and not negative")
    if faults:
        raise LemonError("; ".join(faults))


def _contrast_faults(config: RunConfig) -> list[str]:
    faults = []
    for name in ("counterfactual", "tau"):
        if getattr(config.update, name) == 0 and (config.edits_per_step or config.predicted_edits):
            faults.append(
                f"update.{name} is 0, and nothing would learn from the edits; give edits-per-step = 0 and no "
                "predicted-edits (--no-counterfactual)"
            )
    if not 0 <= config.noise_gate < math.inf:
        faults.append(f"noise-gate is {config.noise_gate}, it must be finite and not negative")
    if config.noise_gate and config.contrast_samples < 2:
        faults.append(
            f"noise-gate is {config.noise_gate} with one sample of a contrast, which has no standard error; "
            "give contrast-samples = 2 or more"
        )
    return faults


def _idle_faults(config: RunConfig) -> list[str]:
    """Options that are not as by default, and nothing reads them."""
    update = config.update
    # Else ratios are 1: up to rounding, which in bfloat16 may come to a bound.
    ratios = config.updates_per_step > 1 or config.overlap or update.compute_dtype == "bfloat16"
    reward = config.reward
    needs: list[tuple[str, Any, RunConfig | UpdateConfig | RewardConfig, tuple[str, ...]]] = [
        ("edits-per-step", config.edits_per_step, config, _OF_EDITS),
        (
            "edits-per-step or predicted-edits",
            config.edits_per_step or config.predicted_edits,
            update,
            _OF_CREDIT,
        ),
        ("counterfactual_form = preference", update.counterfactual_form == "preference", update, ("tau",)),
        ("policy_loss = clipped", update.policy_loss == "clipped", update, ("clip_low", "clip_high")),
        ("policy_loss = truncated", update.policy_loss == "truncated", update, ("truncate",)),
        ("updates-per-step = 2 or overlap", ratios, update, ("clip_low", "clip_high", "truncate")),
        ("kl", update.kl, update, ("kl_estimator",)),
        ("reward.efficiency", reward.efficiency, reward, ("half_cost", "tokens")),
        (
            "reward.tokens = cost and reward.efficiency",
            reward.tokens == "cost" and reward.efficiency,
            config,
            ("price_tables",),
        ),
        ("best-fixed", config.best_fixed, config, ("search_candidates",)),
        ("lora-rank", config.lora_rank, config, ("lora_targets", "lora_alpha")),
    ]
    faults = []
    for need, there, table, names in needs:
        given = [name for name in names if getattr(table, name) != getattr(type(table), name)]
        if given and not there:
            inside = next((name for name in _NESTED if table is getattr(config, name)), None)
            spelled = [f"{inside}.{name}" if inside else name.replace("_", "-") for name in given]
            verb = "has" if len(given) == 1 else "have"
            faults.append(f"{', '.join(spelled)} without {need} {verb} no effect; give both or neither")
    return faults


def _choice_faults(config: RunConfig) -> list[str]:
    faults = []
    if unknown := sorted(config.fixed - {*CHOICES}):
        faults.append(f"fixed-choices has {', '.join(unknown)}, expected some of {', '.join(CHOICES)}")
    if config.fixed and not config.constrained:
        faults.append(
            f"fixed-choices is {config.fixed_choices!r} without constrained: only the grammar keeps a choice "
            "from the policy; give both or neither"
        )
    if config.edits_per_step and not config.families:
        faults.append(
            f"edits-per-step is {config.edits_per_step}, and all edit-families edit what fixed-choices "
            "fixes; give other families, or edits-per-step = 0"
        )
    return faults


def _bench_faults(config: RunConfig) -> list[str]:
    faults = [
        f"{flag} is {text!r}, expected each bench once"
        for flag, text, names in (
            ("bench", config.bench, config.trained),
            ("eval-bench", config.eval_bench, config.tested),
        )
        if len({*names}) < len(names)  # names that nobody has are known where the data is looked for
    ]
    if config.best_fixed and len(config.trained) > 1:
        faults.append("best-fixed searches on one bench; give each bench a run of its own")
    return faults


def _price_faults(config: RunConfig) -> list[str]:
    tables = [("price-tables", table) for table in config.price_tables]
    tables += [("prices", config.prices)] if config.prices else []
    faults = [
        f"{name} has {table!r}, expected three prices of at least 0 (small, medium, large), such as 1,3,10"
        for name, table in tables
        if not isinstance(table, tuple) or len(table) != len(CAPACITIES) or not all(map(_is_price, table))
    ]
    if config.predicted_edits and len(config.price_tables) > 1:
        faults.append(
            "predicted-edits and several price-tables exclude each other: the prediction knows no prices; "
            "give one of them"
        )
    return faults


def _is_price(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _lora_faults(config: RunConfig) -> list[str]:
    if not config.lora_rank:
        return []
    from lemon_jax.model.lora import TARGETS  # imports JAX, which reading a preset does without

    faults = []
    unknown = [name for name in config.lora_targets.split(",") if name not in TARGETS]
    if unknown:
        named = ", ".join(map(repr, unknown))
        faults.append(f"lora-targets has {named}, expected some of {', '.join(TARGETS)}")
    if not 0 < config.lora_alpha < math.inf:
        faults.append(f"lora_alpha is {config.lora_alpha}, it must be positive and finite")
    return faults


def _apply(config: Any, values: dict[str, Any], where: str, faults: list[str]) -> Any:
    known = {f.name: getattr(config, f.name) for f in fields(config)}
    for name in ("bench", "eval_bench", "preset"):  # a preset is of no bench
        known.pop(name, None)
    changes: dict[str, Any] = {}
    for key, given in values.items():
        value = _tuples(given)
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f", did you mean {close[0]}" if close else f", expected one of {', '.join(known)}"
            faults.append(f"unknown key {where}{key}{hint}")
        elif key in _NESTED:
            if isinstance(value, dict):
                changes[key] = _apply(known[key], value, f"{where}{key}.", faults)
            else:
                faults.append(f"{where}{key} must be a table")
        elif not _fits(value, known[key]):
            kind = "list" if isinstance(known[key], tuple) else type(known[key]).__name__
            faults.append(f"{where}{key} is {given!r}, expected {kind}")
        elif key in _WORDS and value not in _WORDS[key]:
            faults.append(f"{where}{key} is {value!r}, expected one of {', '.join(_WORDS[key])}")
        else:
            changes[key] = type(known[key])(value)
    return replace(config, **changes)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, like: Any) -> bool:
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(like, bool)
    if isinstance(like, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(like))
