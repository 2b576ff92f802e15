"""The products' own gradient against JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lemon_jax.model.projection import product


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_plain_product(shape, dtype):
    """Whichever of both is the narrower, which is then transposed."""
    rng = np.random.default_rng(0)
    x, w, given = (
        jnp.asarray(rng.normal(size=size), dtype) for size in [(7, shape[0]), shape, (7, shape[1])]
    )

    def gradients(multiply):
        return jax.jit(lambda x, w: jax.vjp(multiply, x, w)[1](given))(x, w)

    for actual, expected in zip(gradients(product), gradients(jnp.matmul), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (actual, expected)),
            rtol=1e-5 if dtype == "float32" else 2e-2,
            atol=1e-5 if dtype == "float32" else 2e-2,
        )
