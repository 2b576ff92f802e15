import gc
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lemon_jax.errors import LemonError
from lemon_jax.model import PRESETS, Decoder
from lemon_jax.train.checkpoint import KEEP, Checkpoints
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.update import init_state

# Orbax leaves a coroutine that failed on a damaged file to the garbage collector, which complains
# whenever it happens to run.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect_what_damaged_files_left():
    yield
    gc.collect()


CONFIG = UpdateConfig()
SAMPLER = EditSampler(sums=(0.1, 1 / 3, 2.0000000001), weights=(0.1, 0.19, 1 - 1e-16))


@pytest.fixture(scope="module")
def start():
    _, params = nnx.split(Decoder(replace(PRESETS["tiny"], num_layers=1), rngs=nnx.Rngs(0)))
    return init_state(params, CONFIG)


def _state(start, step: int):
    """A state that differs from `start` in every leaf, and by step."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + np.asarray(step, x.dtype)), start)


def _assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def saved(tmp_path, start):
    """A folder with the checkpoints of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(step, _state(start, step), SAMPLER)
    checkpoints.close()
    return tmp_path / "checkpoints"


def _restore(folder: Path, start):
    checkpoints = Checkpoints(folder)
    try:
        return checkpoints.restore(start, EditSampler(rate=0.3, floor=0.2))
    finally:
        checkpoints.close()


def _payload(folder: Path, step: int) -> list[Path]:
    """The files of one checkpoint, the largest first."""
    return sorted(
        (p for p in (folder / str(step)).rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size
    )


def test_the_whole_state_comes_back(saved, start):
    step, state, sampler = _restore(saved, start)
    assert step == 2
    _assert_equal(state, _state(start, 2))
    assert sampler == EditSampler(sums=SAMPLER.sums, weights=SAMPLER.weights, rate=0.3, floor=0.2)


def test_nothing_saved_yet(tmp_path, start):
    assert _restore(tmp_path / "none", start) is None


def test_only_the_newest_are_kept(saved, start):
    checkpoints = Checkpoints(saved)
    for step in (3, 4):
        checkpoints.save(step, _state(start, step), SAMPLER)
    checkpoints.close()
    assert sorted(p.name for p in saved.iterdir() if p.name.isdigit()) == ["3", "4"][:KEEP]


@pytest.mark.parametrize("damage", ["truncate", "empty", "delete", "all"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_it(saved, start, caplog, damage):
    files = _payload(saved, 2)
    if damage == "truncate":
        files[0].write_bytes(files[0].read_bytes()[: files[0].stat().st_size // 2])
    elif damage == "empty":
        files[0].write_bytes(b"")
    elif damage == "delete":
        files[0].unlink()
    else:
        for file in files:
            file.unlink()
    with caplog.at_level(logging.WARNING, logger="lemon_jax.train.checkpoint"):
        step, state, _ = _restore(saved, start)
    assert step == 1
    _assert_equal(state, _state(start, 1))
    warnings = [r.getMessage() for r in caplog.records if r.name == "lemon_jax.train.checkpoint"]
    assert len(warnings) == 1
    assert str(saved / "2") in warnings[0]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(saved, start):
    _payload(saved, 2)[0].unlink()
    checkpoints = Checkpoints(saved)
    step, _, _ = checkpoints.restore(start, SAMPLER)
    assert step == 1
    checkpoints.save(2, _state(start, 7), SAMPLER)
    checkpoints.close()
    step, state, _ = _restore(saved, start)
    assert step == 2
    _assert_equal(state, _state(start, 7))


def test_saving_a_step_again_replaces_it(saved, start):
    checkpoints = Checkpoints(saved)
    checkpoints.save(2, _state(start, 5), SAMPLER)
    checkpoints.close()
    _, state, _ = _restore(saved, start)
    _assert_equal(state, _state(start, 5))


def test_all_damaged_is_an_error(saved, start):
    for step in (1, 2):
        _payload(saved, step)[0].unlink()
    with pytest.raises(LemonError, match=r"all 2 checkpoints are damaged; start a new run"):
        _restore(saved, start)


def test_what_a_kill_left_half_written_is_no_checkpoint(saved, start, caplog):
    """A save writes into a temporary folder and renames it; a kill leaves that folder behind."""
    left = saved / "3.orbax-checkpoint-tmp-1234"
    shutil.copytree(saved / "2", left)
    _payload(saved, "3.orbax-checkpoint-tmp-1234")[0].unlink()
    with caplog.at_level(logging.WARNING, logger="lemon_jax.train.checkpoint"):
        assert _restore(saved, start)[0] == 2
    assert [str(left) in record.getMessage() for record in caplog.records] == [True]
    checkpoints = Checkpoints(saved)
    checkpoints.save(3, _state(start, 3), SAMPLER)
    checkpoints.close()
    assert _restore(saved, start)[0] == 3


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_layers": 2}, ["params.layers.1.mlp.up.value is missing", "opt_state.1.0.mu.layers.1"]),
        ({"num_layers": 1, "mlp_dim": 32}, ["mlp.up.value has shape (32, 64), expected (32, 32)"]),
        ({"num_layers": 1, "qkv_bias": True}, ["params.layers.0.attention.q_bias.value is missing"]),
    ],
)
def test_a_sound_checkpoint_of_another_model_names_every_difference(saved, other, named):
    _, params = nnx.split(Decoder(replace(PRESETS["tiny"], **other), rngs=nnx.Rngs(0)))
    with pytest.raises(LemonError, match="holds another model or optimiser") as error:
        _restore(saved, init_state(params, CONFIG))
    assert all(text in str(error.value) for text in named)
    assert "damaged" not in str(error.value)


def test_another_dtype_is_refused_and_not_rounded(saved, start):
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, start)
    with pytest.raises(LemonError, match="has dtype float32, expected bfloat16"):
        _restore(saved, rounded)
