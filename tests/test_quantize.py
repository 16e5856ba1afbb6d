"""Rounding to 1-byte types, against numpy's own types of the same formats (ml_dtypes)."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_paged_attn import reference
from jax_paged_attn.quantize import quantize
from jax_paged_attn.validation import QUANTIZED_DTYPES

FLOATS = [name for name in QUANTIZED_DTYPES if name != "int8"]


def finite_values(dtype):
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.newest
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", [quantize, reference._stored])
def test_every_value_and_every_tie(dtype, stored):
    values = finite_values(dtype)
    ties = (values[1:] + values[:-1]) / 2
    near = np.concatenate([np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)])
    x = np.concatenate([values, ties, near])
    actual = np.asarray(jax.jit(lambda x: stored(x, None, jnp.dtype(dtype)))(x))
    assert (actual.view(np.uint8) == x.astype(dtype).view(np.uint8)).all()
    assert (actual[: len(values)].astype(np.float32) == values).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", [quantize, reference._stored])
def test_large_values_saturate(dtype, stored):
    largest = float(ml_dtypes.finfo(dtype).max)
    x = jnp.asarray(
        [largest * 1.01, largest * 1.2, 1e30, jnp.inf, -largest * 1.2, -jnp.inf, jnp.nan], jnp.float32
    )
    actual = np.asarray(stored(x, None, jnp.dtype(dtype))).astype(np.float32)
    chex.assert_trees_all_equal(actual, np.array([largest] * 4 + [-largest] * 2 + [np.nan], np.float32))


@pytest.mark.parametrize("stored", [quantize, reference._stored])
def test_int8(stored):
    x = jnp.asarray(
        [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.4, 127.5, 300, -128.4, -300, jnp.inf, -jnp.inf, jnp.nan]
    )
    expected = [0, 2, 2, 0, -2, 126, 127, 127, 127, -128, -128, 127, -128, 0]
    assert stored(x, None, jnp.dtype("int8")).tolist() == expected


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_scales(dtype):
    """By the rounded reciprocal: the same bits everywhere, also in ties; what was stored comes back."""
    scale = np.float32(0.3)
    stored = np.arange(-100, 101).astype("int8") if dtype == "int8" else finite_values(dtype).astype(dtype)
    x = stored.astype(np.float32) * scale
    for function in (quantize, reference._stored):
        again = np.asarray(function(jnp.asarray(x), jnp.float32(scale), jnp.dtype(dtype)))
        assert (again.view(np.uint8) == stored.view(np.uint8)).all()
    ties = (np.arange(-126, 126, dtype=np.float32) + np.float32(0.5)) * scale
    expected = ties * (np.float32(1) / scale)
    expected = np.rint(expected).astype("int8") if dtype == "int8" else expected.astype(dtype)
    actual = np.asarray(jax.jit(lambda x, scale: quantize(x, scale, jnp.dtype(dtype)))(ties, scale))
    assert (actual.view(np.uint8) == expected.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e38])
def test_no_scale_makes_nan_of_a_finite_value(dtype, scale):
    x = jnp.asarray([0.0, -0.0, 1.0, -1.0, 3e38, 1e-38], jnp.float32)
    for function in (quantize, reference._stored):
        stored = np.asarray(function(x, jnp.float32(scale), jnp.dtype(dtype))).astype(np.float32)
        assert np.isfinite(stored).all()
        assert (stored[:2] == 0).all()
