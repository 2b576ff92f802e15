"""What `--bench all` makes sure of before it computes anything; hours later it would be too late."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from replay import differences
from run_arguments import config_of, parse_arguments

if TYPE_CHECKING:
    from lemon_jax.bench import Dataset
    from lemon_jax.train.config import RunConfig


def check_all(args: argparse.Namespace, folders: Mapping[str, Path]) -> None:
    """Raise LemonError with the faults of all benches, each in its folder: a configuration that is no run,
    data that does not serve it, or a run there that was begun with another configuration."""
    from lemon_jax.bench import load
    from lemon_jax.errors import LemonError
    from lemon_jax.train.run_dir import MANIFEST, SUMMARY

    datasets: dict[str, Dataset] = {}
    faults: dict[str, list[str]] = {}  # the benches that have it
    for bench, folder in folders.items():
        try:
            config, _, _ = config_of(argparse.Namespace(**vars(args) | {"bench": bench}))
            if (folder / MANIFEST).exists():
                _check_begun(folder, config)
            if (folder / SUMMARY).exists():
                continue
            for name in {*config.trained, *config.tested} - {*datasets}:
                datasets[name] = load(name, protocol=config.protocol, data_dir=args.data)
            check_data(config, datasets)
        except LemonError as error:
            faults.setdefault(str(error), []).append(bench)
    if faults:
        raise LemonError("; ".join(f"{', '.join(benches)}: {fault}" for fault, benches in faults.items()))


def check_data(config: RunConfig, datasets: Mapping[str, Dataset]) -> None:
    """Raise LemonError where a bench of a run has nothing to train on, or code that may not be run here."""
    from lemon_jax.errors import LemonError

    for bench in dict.fromkeys((*config.trained, *config.tested)):
        if config.steps and bench in config.trained and not datasets[bench].train:
            raise LemonError(
                f"the {config.protocol} protocol scores every task of {bench} and leaves none to "
                "train on; evaluate a policy with --steps 0"
            )
        config.grader.check(datasets[bench].test)


def _check_begun(folder: Path, config: RunConfig) -> None:
    from lemon_jax.errors import LemonError

    before, _, _ = config_of(parse_arguments(["--resume", str(folder)]))
    found = differences(before.to_dict(), config.to_dict())
    if told := [f"{'.'.join(path)} was {was!r}, now {now!r}" for path, was, now in found]:
        raise LemonError(
            f"{folder} was begun with other settings ({', '.join(told)}); give the same, or another --out"
        )
