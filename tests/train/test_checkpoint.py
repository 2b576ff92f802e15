import gc
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lemon_jax.errors import LemonError
from lemon_jax.model import PRESETS, Decoder
from lemon_jax.model.sharding import make_mesh, place, tree_shardings
from lemon_jax.train.checkpoint import KEEP, Checkpoints, folder_of
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
    step, state, sampler, _ = _restore(saved, start)
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
        step, state, _, _ = _restore(saved, start)
    assert step == 1
    _assert_equal(state, _state(start, 1))
    warnings = [r.getMessage() for r in caplog.records if r.name == "lemon_jax.train.checkpoint"]
    assert len(warnings) == 1
    assert str(saved / "2") in warnings[0]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(saved, start):
    _payload(saved, 2)[0].unlink()
    checkpoints = Checkpoints(saved)
    step, _, _, _ = checkpoints.restore(start, SAMPLER)
    assert step == 1
    checkpoints.save(2, _state(start, 7), SAMPLER)
    checkpoints.close()
    step, state, _, _ = _restore(saved, start)
    assert step == 2
    _assert_equal(state, _state(start, 7))


def test_an_earlier_step_than_the_damaged_one_can_be_saved(saved, start):
    """A run that goes on from before it, and is told to stop before it reaches that step again."""
    checkpoints = Checkpoints(saved)
    checkpoints.save(5, _state(start, 5), SAMPLER)
    checkpoints.close()
    _payload(saved, 5)[0].unlink()
    checkpoints = Checkpoints(saved)
    assert checkpoints.restore(start, SAMPLER)[0] == 2
    checkpoints.save(3, _state(start, 3), SAMPLER)
    checkpoints.close()
    assert sorted(p.name for p in saved.iterdir() if p.name.isdigit()) == ["2", "3"]
    assert _restore(saved, start)[0] == 3


def test_saving_a_step_again_replaces_it(saved, start):
    checkpoints = Checkpoints(saved)
    checkpoints.save(2, _state(start, 5), SAMPLER)
    checkpoints.close()
    _, state, _, _ = _restore(saved, start)
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
    with pytest.raises(LemonError, match="holds another model, optimiser") as error:
        _restore(saved, init_state(params, CONFIG))
    assert all(text in str(error.value) for text in named)
    assert "damaged" not in str(error.value)


def test_another_dtype_is_refused_and_not_rounded(saved, start):
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, start)
    with pytest.raises(LemonError, match="has dtype float32, expected bfloat16"):
        _restore(saved, rounded)


def test_what_a_save_began_with_is_kept_whatever_happens_to_the_state_meanwhile(tmp_path, start):
    """The next update writes into the buffers of this state while the save goes on."""
    state = _state(start, 1)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, SAMPLER)
    jax.block_until_ready(overwrite(state))
    checkpoints.close()
    _assert_equal(_restore(tmp_path, start)[1], _state(start, 1))


def test_saves_that_come_faster_than_they_are_written_are_all_written(tmp_path, start):
    checkpoints = Checkpoints(tmp_path)
    for step in range(1, 6):
        checkpoints.save(step, _state(start, step), SAMPLER)
    checkpoints.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["4", "5"]
    checkpoints.close()


def test_what_eight_devices_saved_is_read_on_four_and_on_one(tmp_path, start):
    expected = _state(start, 1)
    meshes = [
        make_mesh(fsdp=4, tensor=2),
        make_mesh(data=2, fsdp=2, devices=jax.devices()[:4]),
        None,
    ]
    like = [start if mesh is None else place(start, mesh) for mesh in meshes]
    state = place(expected, meshes[0])
    for step, template in enumerate(like, start=1):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(step, state, SAMPLER)
        checkpoints.close()
        done, state, _, _ = _restore(tmp_path, template)
        assert done == step
        _assert_equal(state, expected)
        assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(template)]
    assert jax.tree.leaves(like[1])[0].sharding == jax.tree.leaves(tree_shardings(start, meshes[1]))[0]


def test_addresses_stay_as_they_are_and_local_folders_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket = folder_of("gs://bucket/runs/one")
    assert str(bucket) == "gs://bucket/runs/one"
    assert str(bucket / "5") == "gs://bucket/runs/one/5"
    assert str(folder_of(Path("runs"))) == str(tmp_path / "runs")
    assert str(folder_of("runs/../other")) == str(tmp_path / "other")


def test_a_bucket_without_the_library_for_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(LemonError, match=r'gs://bucket/run: .*; pip install "lemon-jax\[gcs\]"'):
        Checkpoints("gs://bucket/run")
