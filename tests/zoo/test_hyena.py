"""The long convolution of the zoo's Hyena."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qwen3next_jax.zoo.hyena import fft_convolution
from tests.refusals import refused


def test_a_long_convolution_is_the_sum_in_each_document():
    """Six channels over four shards, so that some are padding; every gradient; a document of one
    token, padding at the end.
    """
    rng = np.random.default_rng(0)
    x, dy, kernel = (
        rng.normal(size=(2, 16, 3, 2)),
        rng.normal(size=(2, 16, 3, 2)),
        rng.normal(size=(20, 3, 2)),
    )
    ids = np.array([[2] * 5 + [3] + [7] * 8 + [0] * 2, [1] * 16], np.int32)
    distance = np.arange(16)[:, None] - np.arange(16)
    same = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None] & (distance >= 0)
    mesh, row = (
        jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]),
        P(None, "context"),
    )

    def of_shards(x, kernel):
        run = lambda x, kernel, ids: fft_convolution(
            x, kernel, segment_ids=ids, axis_name="context"
        )
        return jax.shard_map(
            run, mesh=mesh, in_specs=(row, P(), row), out_specs=row, check_vma=False
        )(x, kernel, ids)

    def both(f):
        def run(x, kernel):
            y, pullback = jax.vjp(f, x, kernel)
            return y, *pullback(jnp.asarray(dy))

        return jax.jit(run)(x, kernel)

    with jax.enable_x64(True):
        sums = both(
            lambda x, kernel: jnp.einsum(
                "bts,tscd,bscd->btcd", same.astype(float), kernel[np.maximum(distance, 0)], x
            )
        )
        for f in (of_shards, lambda x, kernel: fft_convolution(x, kernel, segment_ids=ids)):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), both(f), sums
            )
    with refused("15", "16", error=ValueError):
        fft_convolution(jnp.asarray(x), jnp.asarray(kernel[:15]))
