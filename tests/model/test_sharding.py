"""The table of logical axes, and that a mesh changes where numbers lie and not what they are."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from lemon_jax.errors import LemonError
from lemon_jax.model import PRESETS, Decoder
from lemon_jax.model.sharding import (
    constrain,
    fetch,
    make_mesh,
    mesh_of,
    param_spec,
    place,
    tree_shardings,
    using,
)

SIZES = {"data": 2, "fsdp": 4, "tensor": 4}


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [  # the sizes of Qwen2.5-7B
        ("embed", (152064, 3584), P("tensor", "fsdp")),
        ("head", (152064, 3584), P("tensor", "fsdp")),
        ("layers.0.attention.q", (3584, 28, 128), P("fsdp", "tensor", None)),
        ("layers.0.attention.k.value", (3584, 4, 128), P("fsdp", "tensor", None)),
        ("layers.0.attention.v_bias", (4, 128), P("tensor", None)),
        ("layers.0.attention.o", (28, 128, 3584), P("tensor", None, "fsdp")),
        ("layers.0.attention.q_norm.scale", (128,), P(None)),
        ("layers.27.mlp.down", (18944, 3584), P("tensor", "fsdp")),
        ("opt_state.1.0.nu.layers.27.mlp.gate.value", (3584, 18944), P("fsdp", "tensor")),
        ("opt_state.1.0.count", (), P()),
        ("layers.0.attention.q_lora_a", (3584, 16), P("fsdp", None)),
        ("layers.0.attention.q_lora_b", (16, 28, 128), P(None, "tensor", None)),
        ("layers.0.attention.o_lora_a", (28, 128, 16), P("tensor", None, None)),
        ("layers.0.mlp.down_lora_b", (16, 3584), P(None, "fsdp")),
        # Two key/value heads are not divided among four devices: each has both.
        ("layers.0.attention.k", (320, 2, 32), P("fsdp", None, None)),
    ],
)
def test_the_table(name, shape, expected):
    assert param_spec(name, shape, SIZES) == expected


def test_a_parameter_that_the_table_does_not_hold_is_named():
    with pytest.raises(LemonError, match=r"layers\.0\.moe\.router with 2 axes is not in the table"):
        param_spec("layers.0.moe.router", (8, 8), SIZES)
    with pytest.raises(LemonError, match=r"attention\.q with 2 axes"):
        param_spec("layers.0.attention.q", (8, 8), SIZES)


def test_a_mesh_uses_all_devices_or_says_how_many_there_are():
    assert make_mesh(data=2, fsdp=2, tensor=2).shape == {"data": 2, "fsdp": 2, "tensor": 2}
    with pytest.raises(LemonError, match=r"mesh data=1,fsdp=3,tensor=1: .* which is 8; change --mesh"):
        make_mesh(fsdp=3)
    with pytest.raises(LemonError, match="positive"):
        make_mesh(data=-1, fsdp=-8)


def test_parameters_and_optimiser_are_split_as_the_table_says_and_come_back_whole():
    config = replace(PRESETS["tiny"], qkv_bias=True, tie_embeddings=False, num_layers=1)
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    _, params = nnx.split(decoder)
    tree = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    mesh = make_mesh(fsdp=4, tensor=2)
    placed = place(tree, mesh)
    assert mesh_of(placed) == mesh
    assert mesh_of(tree) is None
    kept = 0
    for whole, split, sharding in zip(
        jax.tree.leaves(tree),
        jax.tree.leaves(placed),
        jax.tree.leaves(tree_shardings(tree, mesh)),
        strict=True,
    ):
        assert split.sharding == sharding
        kept += math.prod(split.addressable_shards[0].data.shape)
        np.testing.assert_array_equal(fetch(split), whole)
    total = sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert kept < total / 6  # of 8 devices; vectors and biases are kept by several


def test_constraints_mean_the_mesh_of_the_arrays_and_nothing_without_one():
    double = jax.jit(lambda x: constrain(2 * x, "batch", "time"))
    x = np.ones((16, 3), np.float32)
    assert len(double(x).devices()) == 1
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with using(place({"embed": np.ones((4, 4), np.float32)}, mesh)):
        assert double(x).sharding.spec == P(("data", "fsdp"))
        np.testing.assert_array_equal(double(x[:5]), 2 * x[:5])  # 5 rows on 4 places
    with using({"embed": jax.numpy.ones((4, 4))}):
        assert len(double(x).devices()) == 1
