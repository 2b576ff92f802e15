"""Training checkpoints in Orbax v1: the state tree {params, optimiser, edit sampler, step, more}."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # orbax-checkpoint 0.12 ships it under this name
    from orbax.checkpoint.experimental import v1 as ocp

from lemon_jax.errors import NO_ROOM, LemonError
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.hosts import Hosts
from lemon_jax.train.update import TrainState

KEEP = 2
log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int  # how many were done
    state: TrainState
    sampler: EditSampler
    more: Mapping[str, np.ndarray]  # see `Trainer._more`; empty without


class Checkpoints:
    """The checkpoints of one run, in a local folder or at `gs://bucket/folder`; all hosts must see the same.

    A save is atomic: a killed one leaves no checkpoint. It is written while training goes on, from a copy on
    the host, split as the arrays are; a restore splits anew, so that the mesh may be another one.
    """

    def __init__(self, folder: Path | str, hosts: Hosts | None = None):
        self.folder = folder_of(folder)
        self.hosts = hosts or Hosts()
        # A run makes its folder when it begins: one that is resumed and has none is looked for elsewhere.
        self.missing = "://" not in str(self.folder) and not self.folder.exists()
        for half in self.hosts.agree(lambda: _halves(self.folder) if self.hosts.first else []):
            log.warning("%s: a save that did not end; it is removed", half)
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            preservation_policy=ocp.training.preservation_policies.LatestN(KEEP),
            cleanup_tmp_directories=True,
        )
        self._pending: tuple[int, Any] | None = None
        self._skipped: list[int] = []  # damaged, when the run was resumed

    def save(
        self,
        step: int,
        state: TrainState,
        sampler: EditSampler,
        more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Begin to keep the state after `step` steps; older ones but one are removed, and so are damaged ones
        of steps that a resumed run has not reached yet. The state may change as soon as this returns.

        Raises LemonError where the disk is full, perhaps from the save before; the checkpoints that were
        saved stay.
        """
        self.wait()  # one after the other: the library drops a save that comes while another is written
        with self._full_disk(step):
            while self._skipped:
                if (damaged := self._skipped.pop()) > step:
                    self._checkpointer.delete(damaged)
            tree = _tree(step, state, sampler, more)
            # Forced: by itself the library saves no step that is not beyond all it has seen.
            self._pending = (
                step,
                self._checkpointer.save_async(step, tree, overwrite=True, force=True),
            )

    def wait(self) -> None:
        """Return when what was saved lies in the folder. Raises as `save`."""
        if self._pending is not None:
            (step, writing), self._pending = self._pending, None
            with self._full_disk(step):
                writing.result()

    @contextlib.contextmanager
    def _full_disk(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: how the library reports any failed write
            reason = next((text for text in map(os.strerror, NO_ROOM) if text in str(error)), None)
            if reason is None:
                raise
            raise LemonError(
                f"{self.folder / str(step)}: {reason}; make room and go on with --resume"
            ) from error

    def restore(
        self, like: TrainState, sampler: EditSampler, more: Mapping[str, np.ndarray] | None = None
    ) -> Restored | None:
        """The newest readable checkpoint; None if there is none.

        Arrays lie as those of `like`, on whatever devices they were saved. A damaged checkpoint is skipped
        with a warning that names it, on all hosts if it is damaged for one.

        Raises LemonError where every checkpoint is damaged, or a sound one is another model's; then the
        message names each leaf that differs.
        """
        template = jax.tree.map(_abstract, _tree(0, like, sampler, more))
        steps = self.hosts.on_first(
            lambda: sorted((c.step for c in self._checkpointer.checkpoints), reverse=True)
        )
        for step in steps:
            path = self.folder / str(step)
            differences, tree, fault = self._read(step, template)
            faults = [(host, why) for host, why in enumerate(self.hosts.gather(fault)) if why is not None]
            if faults:
                host, why = faults[0]
                where = f"process {host}: " if self.hosts.count > 1 else ""
                log.warning("%s: skipped a damaged checkpoint (%s%s)", path, where, why)
                self._skipped.append(step)
                continue
            if differences:
                raise LemonError(
                    f"{path}: holds another model, optimiser or set of options than this run's: "
                    f"{'; '.join(differences)}; "
                    "resume with the policy and preset that the run began with"
                )
            sums, weights = (tuple(map(float, row)) for row in np.asarray(tree["edit_sampler"]))
            restored = TrainState(params=tree["params"], opt_state=tree["opt_state"])
            sampler = replace(sampler, sums=sums, weights=weights)
            return Restored(int(tree["step"]), restored, sampler, tree.get("more", {}))
        if steps:
            raise LemonError(f"{self.folder}: all {len(steps)} checkpoints are damaged; start a new run")
        return None

    def _read(self, step: int, template: Any) -> tuple[list[str], Any, str | None]:
        """(what is otherwise than in the template, the tree if nothing is, why it cannot be read)."""
        path, context = self.folder / str(step), ocp.Context()
        if self.hosts.count > 1:
            # Without waiting for the others: one whose part is damaged would leave them waiting for it.
            context.multiprocessing.primary_host = self.hosts.index
            context.multiprocessing.active_processes = {self.hosts.index}
        try:
            with context:
                differences = _differences(ocp.metadata(path).metadata, template)
                return differences, None if differences else ocp.load(path, template), None
        except Exception as error:  # whatever a damaged file raises inside the library
            reason = str(error).strip().splitlines()
            return [], None, reason[0][:160] if reason else type(error).__name__

    def unmake(self) -> None:
        """Remove the folder if this has made it, so that it is missed again next time."""
        if self.missing:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def close(self) -> None:
        """Wait for what was saved, and let go of the folder. Raises as `save`."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()


def holds_any(folder: Path | str) -> bool:
    """Whether a folder, or an address, holds checkpoints of some run, be they half written."""
    place = folder_of(folder)
    with _client_installed(place):
        return place.exists() and any(p.name[:1].isdigit() for p in place.iterdir())


@contextlib.contextmanager
def _client_installed(folder: epath.Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise LemonError(
            f'{folder}: {error}; pip install "lemon-jax[gcs]", or give a local --checkpoint-dir'
        ) from error


def _halves(folder: epath.Path) -> list[epath.Path]:
    """What saves that did not end have left. A local one lies under a name of its own until it is whole; at
    an address, where a folder cannot be renamed, a last file says that it is."""
    if "://" not in str(folder):
        return sorted(folder.glob("*.orbax-checkpoint-tmp*"))
    with _client_installed(folder):
        steps = [p for p in folder.iterdir() if p.name.isdigit()] if folder.exists() else []
        return sorted(p for p in steps if not (p / "commit_success.txt").exists())


def folder_of(path: Path | str) -> epath.Path:
    """A folder as the library wants it: absolute if it is local, and an address (gs://) left as it is."""
    if "://" in str(path):
        return epath.Path(str(path))
    return epath.Path(Path(path).resolve())


def _tree(
    step: int, state: TrainState, sampler: EditSampler, more: Mapping[str, np.ndarray] | None
) -> dict[str, Any]:
    tree = {
        "params": state.params,
        "opt_state": state.opt_state,
        "edit_sampler": np.asarray([sampler.sums, sampler.weights], np.float64),
        "step": np.asarray(step, np.int32),
    }
    return tree | ({"more": dict(more)} if more else {})


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
