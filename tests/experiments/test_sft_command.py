"""The command that the manifest of a warm-started policy names."""

from __future__ import annotations

import pytest
from experiment_helpers import script

sft = script("sft")


def test_it_names_no_folder_of_this_machine():
    argv = "--data=/home/me/data --out /home/me/out --init /home/me/policy/ --teacher=/me/big.toml --steps 7"
    assert sft._command(sft._arguments(argv.split())) == (
        "python experiments/sft.py --policy compact --steps 7 --batch 32 --specs-per-bench 2520 "
        "--learning-rate 0.0015 --seed 0 --init policy --teacher big.toml"
    )
    assert sft._command(sft._arguments([])).endswith("--seed 0 --teacher sampler")


def test_flags_are_written_out():
    with pytest.raises(SystemExit):
        sft._arguments(["--dat", "/home/me/data"])
