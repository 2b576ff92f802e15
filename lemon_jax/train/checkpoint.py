"""Training checkpoints in Orbax v1: the state tree {params, optimiser, edit sampler, step}."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # orbax-checkpoint 0.12 ships it under this name
    from orbax.checkpoint.experimental import v1 as ocp

from lemon_jax.errors import NO_ROOM, LemonError
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.update import TrainState

KEEP = 2
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run directory. A save is atomic: a killed one leaves no checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        for half in sorted(self.folder.glob("*.orbax-checkpoint-tmp*")):
            log.warning("%s: a save that did not end; it is removed", half)
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(KEEP),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: TrainState, sampler: EditSampler) -> None:
        """Keep the state after `step` steps; older ones but one are removed.

        Raises LemonError where the disk is full; the checkpoints before it stay.
        """
        try:
            self._checkpointer.save(step, _tree(step, state, sampler), overwrite=True)
        except ValueError as error:  # how the library reports any failed write
            reason = next((text for text in map(os.strerror, NO_ROOM) if text in str(error)), None)
            if reason is None:
                raise
            raise LemonError(
                f"{self.folder / str(step)}: {reason}; make room and go on with --resume"
            ) from error

    def restore(self, like: TrainState, sampler: EditSampler) -> tuple[int, TrainState, EditSampler] | None:
        """The newest readable checkpoint as (steps done, state, edit sampler); None if there is none.

        Damaged ones are skipped with a warning that names them. Raises LemonError if all are damaged, or if
        the newest readable one holds another tree: with every difference in keys, shapes and dtypes.
        """
        steps = sorted((c.step for c in self._checkpointer.checkpoints), reverse=True)
        template = jax.tree.map(_abstract, _tree(0, like, sampler))
        for step in steps:
            try:
                differences = _differences(self._checkpointer.metadata(step).metadata, template)
                tree = {} if differences else self._checkpointer.load(step, template)
            except Exception as error:  # whatever a damaged file raises inside the library
                reason = str(error).strip().splitlines()
                log.warning(
                    "%s: skipped a damaged checkpoint (%s)",
                    self.folder / str(step),
                    reason[0][:160] if reason else type(error).__name__,
                )
                continue
            if differences:
                raise LemonError(
                    f"{self.folder / str(step)}: holds another model or optimiser than this run's: "
                    f"{'; '.join(differences)}; resume with the policy and preset that the run began with"
                )
            sums, weights = (tuple(map(float, row)) for row in np.asarray(tree["edit_sampler"]))
            restored = TrainState(params=tree["params"], opt_state=tree["opt_state"])
            return int(tree["step"]), restored, replace(sampler, sums=sums, weights=weights)
        if steps:
            raise LemonError(f"{self.folder}: all {len(steps)} checkpoints are damaged; start a new run")
        return None

    def close(self) -> None:
        self._checkpointer.close()


def _tree(step: int, state: TrainState, sampler: EditSampler) -> dict[str, Any]:
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "edit_sampler": np.asarray([sampler.sums, sampler.weights], np.float64),
        "step": np.asarray(step, np.int32),
    }


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _leaves(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each leaf by its dotted name, of a tree or of what a file says of one."""

    def name(path: tuple[Any, ...]) -> str:
        keys = (next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)) for k in path)
        return ".".join(map(str, keys))

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {name(path): (tuple(leaf.shape), str(np.dtype(leaf.dtype))) for path, leaf in flat}


def _differences(found: Any, expected: Any) -> list[str]:
    """What a checkpoint's tree has otherwise than the one that is wanted, leaf by leaf.

    Raises ValueError for one without any leaf of ours: what the library makes of a description that is empty.
    """
    there, wanted = _leaves(found), _leaves(expected)
    if there.keys().isdisjoint(wanted):
        raise ValueError("its description holds no part of a training state")
    out = [f"{name} is missing" for name in sorted(wanted.keys() - there.keys())]
    out += [f"{name} is unexpected" for name in sorted(there.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & there.keys()):
        for what, a, b in zip(("shape", "dtype"), there[name], wanted[name], strict=True):
            out += [f"{name} has {what} {a}, expected {b}"] if a != b else []
    return out
