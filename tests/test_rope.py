"""Rotary position embedding against complex numbers in float64, and its frequencies against other forms."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import (
    Llama3Scaling,
    YarnScaling,
    apply_rope,
    reference,
    rope_cos_sin,
    rope_frequencies,
)

ONE, TWO = np.ones((1, 1, 4), np.float32), np.ones(2, np.float32)
POSITIONS = np.array([0, 1, 17, 4095, 131071], np.int32)


def rotated(x, positions, inv_freq, interleaved):
    """Rotate in float64; angles are float32 products, as models were trained with."""
    x = np.asarray(x).astype(np.float64)
    angles = (positions.astype(np.float32)[:, None] * np.asarray(inv_freq)).astype(np.float64)[:, None]
    half = angles.shape[-1]
    pairs = np.arange(half)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + half)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    out = x.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.newest
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (80, 32), (6, 2), (10, 10)])
@pytest.mark.parametrize("function", [apply_rope, reference.apply_rope])
def test_rotation(function, head_dim, rotary_dim, interleaved):
    rng = np.random.default_rng(head_dim)
    x = rng.standard_normal((5, 3, head_dim)).astype(np.float32)
    inv_freq = rope_frequencies(rotary_dim, base=500_000.0)
    out = function(x, POSITIONS, inv_freq=inv_freq, interleaved=interleaved)
    chex.assert_trees_all_close(
        np.asarray(out, np.float64), rotated(x, POSITIONS, inv_freq, interleaved), atol=2e-6
    )
    chex.assert_trees_all_equal(out[..., rotary_dim:], x[..., rotary_dim:])
    table = rope_cos_sin(inv_freq, 5000)
    out = function(x[:4], POSITIONS[:4], cos_sin=table, interleaved=interleaved)
    expected = rotated(x[:4], POSITIONS[:4], inv_freq, interleaved)
    chex.assert_trees_all_close(np.asarray(out, np.float64), expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_float32_inside(dtype, interleaved):
    """One rounding at the end: half a unit in the last place."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 64)), dtype)
    inv_freq = rope_frequencies(64)
    out = apply_rope(x, POSITIONS, inv_freq=inv_freq, interleaved=interleaved)
    chex.assert_type(out, dtype)
    expected = rotated(x, POSITIONS, inv_freq, interleaved)
    eps = float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(np.asarray(out).astype(np.float64), expected, rtol=0.51 * eps, atol=1e-6)


def test_dims_past_the_rotary_ones_are_untouched_to_the_bit():
    x = np.full((1, 2, 128), np.nan, np.float32).view(np.uint32) | 1  # a NaN with a payload
    out = apply_rope(x.view(np.float32), [7], inv_freq=rope_frequencies(64))
    assert (np.asarray(out).view(np.uint32)[..., 64:] == x[..., 64:]).all()


def test_a_scaled_table_scales_the_rotation():
    x, inv_freq = jnp.ones((5, 2, 64)), rope_frequencies(64)
    table = rope_cos_sin(inv_freq, 200_000, attention_factor=1.5)
    once = apply_rope(x, POSITIONS, inv_freq=inv_freq)
    chex.assert_trees_all_close(apply_rope(x, POSITIONS, cos_sin=table), 1.5 * once, rtol=1e-5, atol=1e-6)
    half_precision = apply_rope(x, POSITIONS, cos_sin=table.astype(jnp.bfloat16))
    chex.assert_trees_all_close(half_precision, 1.5 * once, atol=0.03)


def test_positions_outside_the_table_give_nan():
    """Not the nearest row, which would be a wrong number."""
    out = apply_rope(jnp.ones((4, 1, 4)), [-1, 0, 9, 2**31 - 1], cos_sin=rope_cos_sin(TWO, 9))
    assert np.isnan(out).all(axis=(1, 2)).tolist() == [True, False, True, True]
    checked = functools.partial(apply_rope, cos_sin=jnp.ones((9, 4)), validate_values=True)
    with pytest.raises(ValueError, match=r"^positions: expected values in \[0, 9\)"):
        checked(jnp.ones((1, 1, 4)), [9])
    error, _ = jax.jit(checkify.checkify(checked))(jnp.ones((1, 1, 4)), jnp.array([9]))
    with pytest.raises(ValueError, match="positions: expected values in"):
        error.throw()
    checked(jnp.ones((1, 1, 4)), [8])


def llama3(rotary_dim, base, factor, low_freq_factor, high_freq_factor, original):
    """The scaling as Llama 3.1's model code has it, frequency by frequency."""
    result = []
    for i in range(rotary_dim // 2):
        frequency = base ** (-2 * i / rotary_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high_freq_factor:
            result.append(frequency)
        elif wavelength > original / low_freq_factor:
            result.append(frequency / factor)
        else:
            smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            result.append((1 - smooth) * frequency / factor + smooth * frequency)
    return result


@pytest.mark.parametrize(("rotary_dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama3_scaling(rotary_dim, factor):
    actual = rope_frequencies(rotary_dim, base=500_000.0, scaling=Llama3Scaling(factor=factor))
    expected = llama3(rotary_dim, 500_000.0, factor, 1.0, 4.0, 8192)
    chex.assert_trees_all_close(np.asarray(actual, np.float64), np.array(expected), rtol=1e-7)
    plain = np.asarray(rope_frequencies(rotary_dim, base=500_000.0))
    chex.assert_trees_all_equal(np.asarray(actual)[0], plain[0])  # the fastest is kept
    chex.assert_trees_all_close(np.asarray(actual)[-1], plain[-1] / np.float32(factor), rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scaling(truncate):
    """Section 3.2 of the paper, in terms of the turns in the original context."""
    dim, base, factor, original = 64, 10_000.0, 40.0, 4096
    actual = rope_frequencies(dim, base=base, scaling=YarnScaling(factor, original, truncate=truncate))

    def index(turns):
        """The (fractional) pair that turns so many times."""
        return dim / 2 * math.log(original / (2 * math.pi * turns), base)

    low, high = index(32.0), index(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i in range(dim // 2):
        frequency = base ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(frequency / factor * ramp + frequency * (1 - ramp))
    chex.assert_trees_all_close(np.asarray(actual, np.float64), np.array(expected), rtol=1e-7)
    assert YarnScaling(factor, original).attention_factor == pytest.approx(0.1 * math.log(40) + 1)
    assert YarnScaling(1.0, original).attention_factor == 1.0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rotary_dim", lambda: rope_frequencies(63)),
        ("rotary_dim", lambda: rope_frequencies(0)),
        ("rotary_dim", lambda: rope_frequencies(64.0)),  # pyright: ignore[reportArgumentType]
        ("base", lambda: rope_frequencies(64, base=1.0)),
        ("base", lambda: rope_frequencies(64, base=math.inf)),
        ("scaling", lambda: rope_frequencies(64, scaling={"factor": 8})),  # pyright: ignore[reportArgumentType]
        ("factor", lambda: Llama3Scaling(factor=0.0)),
        ("high_freq_factor", lambda: Llama3Scaling(low_freq_factor=4.0)),
        ("original_max_position", lambda: YarnScaling(8.0, 0)),
        ("high_freq_factor", lambda: Llama3Scaling(high_freq_factor="4")),  # pyright: ignore[reportArgumentType]
        ("factor", lambda: Llama3Scaling(factor=10**400)),
        ("base", lambda: rope_frequencies(64, base=10**400)),
        ("beta_fast", lambda: YarnScaling(8.0, 4096, beta_fast=1.0, beta_slow=32.0)),
        ("truncate", lambda: YarnScaling(8.0, 4096, truncate="no")),  # pyright: ignore[reportArgumentType]
        ("beta_slow", lambda: YarnScaling(8.0, 4096, beta_slow=-1.0)),
        ("inv_freq", lambda: rope_cos_sin(np.ones((2, 2), np.float32), 4)),
        ("inv_freq", lambda: rope_cos_sin(np.ones(2, np.int32), 4)),
        ("num_positions", lambda: rope_cos_sin(TWO, 0)),
        ("attention_factor", lambda: rope_cos_sin(TWO, 4, attention_factor="1")),  # pyright: ignore[reportArgumentType]
        ("x", lambda: apply_rope(np.ones((2, 4), np.float32), [0, 1], inv_freq=TWO)),
        ("x", lambda: apply_rope(np.ones((1, 1, 4), np.int32), [0], inv_freq=TWO)),
        ("positions", lambda: apply_rope(ONE, [0, 1], inv_freq=TWO)),
        ("positions", lambda: apply_rope(ONE, [0.0], inv_freq=TWO)),
        ("inv_freq", lambda: apply_rope(ONE, [0], inv_freq=np.ones(3, np.float32))),
        ("cos_sin", lambda: apply_rope(ONE, [0], cos_sin=np.ones((9, 3), np.float32))),
        ("cos_sin", lambda: apply_rope(ONE, [0], cos_sin=np.ones(4, np.float32))),
        ("inv_freq, cos_sin", lambda: apply_rope(ONE, [0])),
    ],
)  # fmt: skip
def test_wrong_arguments(name, call):
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        call()


def test_numpy_numbers_are_numbers():
    scaling: Any = YarnScaling(np.float32(4), np.int64(4096))  # pyright: ignore[reportArgumentType]
    base: Any = np.float32(10_000.0)
    actual = rope_frequencies(64, base=base, scaling=scaling)
    chex.assert_trees_all_equal(actual, rope_frequencies(64, scaling=YarnScaling(4.0, 4096)))


def test_under_vmap_and_grad():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), jnp.float32)
    rope = functools.partial(apply_rope, inv_freq=rope_frequencies(8))
    each = [rope(one, POSITIONS) for one in x]
    chex.assert_trees_all_close(jax.vmap(rope, in_axes=(0, None))(x, POSITIONS), jnp.stack(each))
    gradient = jax.grad(lambda x: rope(x, POSITIONS).sum())(x[0])
    by_reference = jax.grad(lambda x: reference.apply_rope(x, POSITIONS, inv_freq=rope_frequencies(8)).sum())(
        x[0]
    )
    chex.assert_trees_all_close(gradient, by_reference, atol=1e-5)
