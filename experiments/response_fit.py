"""The fit of the response model to judged calls; `calibrate.py` reads the calls and says how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from lemon_jax.backends.response_model import EFFECTS, HARMS, Situation
from lemon_jax.spec import CAPACITIES
from lemon_jax.spec.code_roles import CODE_ROLES
from lemon_jax.train.simulation import simulated_roles

NODES = 15  # of the quadrature
# Standard deviations of the priors, in logits.
PRIORS = {"base": 5.0, "role": 1.5, "level": 1.0, "pair": 0.5, "bench": 2.0, "effect": 1.0}
ROLE_NAMES = [role.name for role in simulated_roles() if role not in CODE_ROLES]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One judged call."""

    task: str
    bench: str
    role: str
    level: str
    place: Situation
    guess: float
    right: bool
    tokens: int


class Fit:
    """The maximum of the penalised marginal likelihood; `at` holds the parameters by name."""

    def __init__(
        self, calls: list[Observed], *, bounded: bool = True, by_hand: Mapping[str, float] | None = None
    ) -> None:
        self.benches = sorted({c.bench for c in calls})
        self._sizes = {
            "base": 1,
            "role": len(ROLE_NAMES),
            "level": len(CAPACITIES),
            "pair": len(ROLE_NAMES) * len(CAPACITIES),
            "bench": len(self.benches),
            "effect": len(EFFECTS),
            "log_spread": 1,
        }
        data = self._arrays(calls)
        start = np.zeros(sum(self._sizes.values()))
        value = jax.jit(jax.value_and_grad(lambda x: self._loss(x, data)))

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            loss, gradient = value(jnp.asarray(x))
            return float(loss), np.asarray(gradient)

        bounds: list[tuple[float | None, float | None]] = [(None, None)] * len(start)
        bounds[-1] = (-3.0, 2.0)  # of the logarithm of the spread
        first = len(start) - 1 - len(EFFECTS)
        for i, name in enumerate(EFFECTS, start=first):
            fixed = (by_hand or {}).get(name)
            start[i] = fixed or 0.0
            bounds[i] = (fixed, fixed) if fixed is not None else (0.0 if bounded else None, None)
        found = minimize(
            objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 500}
        )
        self.at = {name: np.asarray(part) for name, part in self._split(jnp.asarray(found.x)).items()}
        self.spread = float(np.exp(self.at["log_spread"][0]))

    def ability(self, role: str, level: str) -> float:
        """A role's ability at a level, in logits."""
        r, c = ROLE_NAMES.index(role), CAPACITIES.index(level)
        at = self.at
        return float(at["base"][0] + at["role"][r] + at["level"][c] + at["pair"][r * len(CAPACITIES) + c])

    def predict(self, calls: list[Observed]) -> np.ndarray:
        """P(right) of calls on tasks of which nothing is known."""
        data = self._arrays(calls)
        # Of a bench that the fit has no call of, the mean of the others.
        at = self.at | {"bench": np.append(self.at["bench"], self.at["bench"].mean())}
        p, weights = self._probabilities({k: jnp.asarray(v) for k, v in at.items()}, data)
        return np.asarray(p @ weights)

    def _split(self, x: jax.Array) -> dict[str, jax.Array]:
        parts, at = {}, 0
        for name, size in self._sizes.items():
            parts[name] = x[at : at + size]
            at += size
        return parts

    def _arrays(self, calls: list[Observed]) -> dict[str, np.ndarray]:
        tasks = {task: i for i, task in enumerate(dict.fromkeys(c.task for c in calls))}
        role = np.array([ROLE_NAMES.index(c.role) for c in calls])
        level = np.array([CAPACITIES.index(c.level) for c in calls])
        benches = {bench: i for i, bench in enumerate(self.benches)}
        signs = np.array([-1.0 if name in HARMS else 1.0 for name in EFFECTS])
        return {
            "role": role,
            "level": level,
            "pair": role * len(CAPACITIES) + level,
            "bench": np.array([benches.get(c.bench, len(benches)) for c in calls]),
            "counts": np.array([c.place.counts() for c in calls], dtype=float) * signs,
            "guess": np.array([c.guess for c in calls]),
            "right": np.array([c.right for c in calls], dtype=float),
            "task": np.array([tasks[c.task] for c in calls]),
        }

    def _probabilities(
        self, at: dict[str, jax.Array], d: dict[str, np.ndarray]
    ) -> tuple[jax.Array, jax.Array]:
        """P(right) [calls, nodes] and the nodes' weights."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        logits = (
            at["base"][0]
            + at["role"][d["role"]]
            + at["level"][d["level"]]
            + at["pair"][d["pair"]]
            - at["bench"][d["bench"]]
            + d["counts"] @ at["effect"]
        )
        x = logits[:, None] - jnp.exp(at["log_spread"][0]) * nodes[None, :]
        p = d["guess"][:, None] + (1 - d["guess"][:, None]) * jax.nn.sigmoid(x)
        return p, jnp.asarray(weights / weights.sum())

    def _loss(self, x: jax.Array, d: dict[str, np.ndarray]) -> jax.Array:
        at = self._split(x)
        p, weights = self._probabilities(at, d)
        p = jnp.clip(p, 1e-9, 1 - 1e-9)
        right = d["right"][:, None]
        log_p = right * jnp.log(p) + (1 - right) * jnp.log1p(-p)
        by_task = jax.ops.segment_sum(log_p, d["task"], num_segments=int(d["task"].max()) + 1)
        likelihood = jax.scipy.special.logsumexp(by_task + jnp.log(weights)[None, :], axis=1).sum()
        penalty = sum(jnp.sum((at[name] / sd) ** 2) / 2 for name, sd in PRIORS.items())
        return penalty - likelihood
