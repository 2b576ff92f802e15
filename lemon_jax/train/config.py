"""A run is this configuration and nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lemon_jax.bench import Prices
from lemon_jax.errors import LemonError
from lemon_jax.runtime.tools import ACCEPTED
from lemon_jax.spec import CHOICE_OF, DEFAULT_BASELINES, FAMILIES, OPT_IN_FAMILIES
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.grading import Grader
from lemon_jax.train.rewards import RewardConfig

MESH_AXES = ("data", "fsdp", "tensor")  # model.sharding's, which imports JAX


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """Static choices of the update. What each does, with its source, stands in `losses`."""

    learning_rate: float = 2e-4
    warmup: int = 2
    clip_norm: float = 1.0
    policy_loss: Literal["clipped", "truncated"] = "clipped"
    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    truncate: float = 2.0  # the largest importance weight of the truncated loss
    advantage_scale: Literal["group", "batch", "none"] = "group"
    aggregation: Literal["token", "sequence", "constant"] = "token"
    kl: float = 0.03  # 0: no reference policy is scored
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    counterfactual: float = 4.0  # weight of the counterfactual loss; without edits: edits_per_step = 0
    counterfactual_form: Literal["preference", "gradient"] = "preference"
    tau: float = 1.0
    normalise_spans: bool = True
    temperature: float = 0.7  # of sampling and scoring alike; at 1 more specs are invalid
    # Of sampling and scoring alike. Parameters and moments stay float32, log-probabilities are float32.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """How a run is computed and not what: every choice gives the same numbers up to rounding, so that a run
    may be resumed with another. The mesh's sizes multiply to the number of devices."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1  # an update's rollouts go through the decoder in this many parts
    remat: bool = False  # recompute each block in the backward pass

    def __post_init__(self) -> None:
        low = [name for name in ("data", "fsdp", "tensor", "accumulate") if getattr(self, name) < 1]
        if low:
            raise LemonError(f"{', '.join(low)} must be at least 1")

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @classmethod
    def of(cls, earlier: dict[str, Any], mesh: str | None, given: dict[str, Any]) -> ScaleConfig:
        """The choices of an earlier process of the run, changed by a mesh such as "data=1,fsdp=8" (what it
        leaves out is 1) and by what else is given and not None. Raises LemonError for what is no mesh."""
        values = {name: value for name, value in earlier.items() if name in cls.__dataclass_fields__}
        if mesh is not None:
            parts = [part.partition("=") for part in mesh.split(",")]
            if any(name not in MESH_AXES or not size.isdecimal() for name, _, size in parts):
                raise LemonError(f"mesh is {mesh!r}, expected sizes such as data=1,fsdp=8,tensor=1")
            values |= dict.fromkeys(MESH_AXES, 1) | {name: int(size) for name, _, size in parts}
        return cls(**values | {name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All that decides a run's numbers. Where it is written, and whether recordings serve it, does not."""

    bench: str  # or several, "gsm8k,svamp": one policy is trained on all of them, on each as often
    eval_bench: str = ""  # where policies and baselines are tested, as `bench`; "": on what is trained on
    protocol: str = "full"  # which splits are trained and evaluated on, and by which rule answers are read
    preset: str = "default"
    workers: str = "embedded"
    policy: str = "warmstart"
    seed: int = 0
    steps: int = 20
    tasks_per_step: int = 4
    group: int = 4
    edits_per_step: int = 4  # counterfactual executions a step; 0 without counterfactuals
    edits_per_rollout: int = 1  # different edits of one spec; a second one only when every spec has one
    contrast_samples: int = 1  # executions of an original and of its edit; from 2 on D has a standard error
    noise_gate: float = 0.0  # contrasts within so many standard errors of 0 are not learned from; 0: off
    common_random_numbers: bool = True  # an edited spec asks its workers with the original's sample indices
    edit_families: str = ",".join(FAMILIES)  # what an edit may change; opt-in ones: see lemon_jax.spec.edits
    predicted_edits: int = 0  # more edits a step, of any family, by what past executions say: contrast_model
    edit_sampling: Literal["adaptive", "uniform"] = "adaptive"  # of a family: by its contrasts, or evenly
    dynamic_sampling: int = 0  # rounds in which groups without signal are replaced, at most; 0: none are
    overlap: bool = False  # a step's specs are executed beside the update before: off-policy by one step
    updates_per_step: int = 2  # passes over a step's specs; from the second on the ratios are clipped
    tell_prices: bool = False  # what the policy reads begins with the prices of the capacities
    price_tables: tuple[Prices, ...] = ()  # training's, small to large, dealt to tasks; (): the worker file's
    prices: Prices = ()  # those of the evaluation; (): the worker file's
    constrained: bool = False  # specs are sampled, and scored, within the canonical spec language
    fixed_choices: str = ""  # some of lemon_jax.spec.CHOICES, which that language then leaves out (ablations)
    eval_tasks: int = 50
    accept_isolation: str = ACCEPTED  # the lowest under which an answer's code may run
    baselines: str = ",".join(DEFAULT_BASELINES)  # to evaluate beside the policy; also "all" and "none"
    best_fixed: bool = False  # search the best fixed spec and evaluate it too
    search_candidates: int = 16
    search_tokens: int = 0  # worker tokens of that search; 0: as many as the training used
    checkpoint_every: int = 5
    lora_rank: int = 0  # of low-rank adapters, which alone are trained then; 0: all parameters are
    lora_alpha: float = 16.0  # a correction counts lora_alpha / lora_rank times
    lora_targets: str = "q,k,v,o,gate,up,down"  # the projections of a block that have adapters
    reward: RewardConfig = field(default_factory=RewardConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    @property
    def trained(self) -> tuple[str, ...]:
        """The benches that are trained on."""
        return _names(self.bench)

    @property
    def tested(self) -> tuple[str, ...]:
        """The benches that are evaluated on."""
        return _names(self.eval_bench or self.bench)

    @property
    def specs_per_step(self) -> int:
        return self.tasks_per_step * self.group

    @property
    def fixed(self) -> frozenset[str]:
        """The names in `fixed_choices`."""
        return frozenset(name.strip() for name in self.fixed_choices.split(",") if name.strip())

    @property
    def families(self) -> tuple[str, ...]:
        """Those of `edit_families` whose edits stay within the language of the run."""
        named = (name.strip() for name in self.edit_families.split(","))
        return tuple(name for name in named if CHOICE_OF.get(name) not in self.fixed)

    @property
    def predicted_families(self) -> tuple[str, ...]:
        """What a predicted edit may change: it costs nothing, so all that does not leave the language."""
        every = (*FAMILIES, *OPT_IN_FAMILIES)
        return tuple(name for name in every if CHOICE_OF.get(name) not in self.fixed)

    @property
    def edit_sampler(self) -> EditSampler:
        """The sampler of edits that a run begins with.

        A run with no family draws no edit; its sampler holds the default ones, as a checkpoint needs some.
        """
        families = self.families or FAMILIES
        floor = min(EditSampler.floor, 0.5 / len(families))  # with many families, half of it is still free
        return EditSampler(families=families, floor=floor, adaptive=self.edit_sampling == "adaptive")

    @property
    def grader(self) -> Grader:
        return Grader.of(self.protocol, self.accept_isolation)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The config written by `to_dict`. Raises TypeError for keys of another version."""
        nested = {
            "reward": RewardConfig(**values.get("reward", {})),
            "update": UpdateConfig(**values.get("update", {})),
            "price_tables": tuple(map(tuple, values.get("price_tables", ()))),  # JSON has lists
            "prices": tuple(values.get("prices", ())),
        }
        return cls(**(values | nested))

    def sha256(self) -> str:
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))
