"""Rounding to 1-byte types, against numpy's own types of the same formats (ml_dtypes); scales from data."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_paged_attn import append_kv, append_paged_kv, kv_quantize, kv_scale, paged_attention, reference
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.quantize import GRANULARITIES, quantize
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


# Scales from data


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# How far a value of [-1, 1] can be from what is stored, before the scale: half a step of the largest values.
HALF_STEP = {"float8_e4m3fn": 2.0**-4 / 1.75, "float8_e5m2": 2.0**-3 / 1.75, "int8": 0.5 / 127}
SHAPE = (3, 2, 16, 64)  # HND
AXES = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "HPND": (1, 0, 2, 3)}


def data(shape=SHAPE, dtype="float32", seed=0):
    """Random values of which each token and head has its own size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((*shape[:-1], 1)))
    return jnp.asarray(x, jnp.dtype(dtype))


def dequantize(quantized, scale, heads_axis):
    scale = np.asarray(scale)
    if scale.ndim == 1:
        scale = np.expand_dims(scale, tuple(axis for axis in range(quantized.ndim) if axis != heads_axis))
    elif scale.ndim > 1:
        scale = scale[..., None]
    return np.asarray(quantized).astype(np.float32) * scale, scale


@pytest.mark.newest
@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kv_layout", AXES)
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_a_cache_comes_back_within_half_a_step(dtype, granularity, kv_layout, x_dtype):
    x = data(dtype=x_dtype).transpose(AXES[kv_layout])
    heads_axis = AXES[kv_layout].index(1)
    quantized, scale = kv_quantize(x, dtype, granularity=granularity, kv_layout=kv_layout)
    assert quantized.dtype == jnp.dtype(dtype)
    chex.assert_shape(quantized, x.shape)
    chex.assert_type(scale, jnp.float32)
    chex.assert_shape(scale, {"tensor": (), "head": (2,), "token": x.shape[:-1]}[granularity])
    chex.assert_trees_all_equal(scale, kv_scale(x, dtype, granularity=granularity, kv_layout=kv_layout))

    values = np.asarray(x).astype(np.float32)
    back, scale = dequantize(quantized, scale, heads_axis)
    others = {
        "tensor": None,
        "head": tuple(axis for axis in range(4) if axis != heads_axis),
        "token": -1,
    }[granularity]
    amax = np.abs(values).max(axis=others, keepdims=True)
    np.testing.assert_allclose(np.broadcast_to(scale, amax.shape), amax / LARGEST[dtype], rtol=2e-7)
    assert (np.abs(back - values) <= HALF_STEP[dtype] * amax * (1 + 1e-5)).all()
    # The largest value of each group comes back to within float32's rounding.
    largest = np.abs(values) == np.broadcast_to(amax, values.shape)
    np.testing.assert_allclose(back[largest], values[largest], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_relative_errors_of_floats_are_those_of_their_mantissa(dtype):
    x = data()
    back, scale = dequantize(*kv_quantize(x, dtype, granularity="token"), heads_axis=1)
    normal = np.abs(x) > scale * float(ml_dtypes.finfo(dtype).smallest_normal)
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    assert (np.abs(back - x) <= half_ulp * np.abs(x) * (1 + 1e-6))[normal].all()
    assert normal.mean() > 0.9


@pytest.mark.parametrize(("dtype", "kv_layout"), list(zip(QUANTIZED_DTYPES, AXES, strict=True)))
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_append_stores_the_same_and_attention_takes_the_scales(dtype, granularity, kv_layout):
    """New tokens with scales of their own data, and then the pool that they fill."""
    tokens = data((48, 2, 64), seed=1)
    quantized, scale = kv_quantize(tokens, dtype, granularity=granularity)
    pool = jnp.zeros(SHAPE, jnp.dtype(dtype)).transpose(AXES[kv_layout])
    scale_pages = jnp.zeros(pool.shape[:-1]) if granularity == "token" else None
    slots = np.random.default_rng(0).permutation(48)
    k_pages, v_pages, *scales = append_paged_kv(
        pool,
        pool,
        tokens,
        tokens,
        slots,
        k_scale=scale,
        v_scale=scale,
        k_scale_pages=scale_pages,
        v_scale_pages=scale_pages,
        kv_layout=kv_layout,
    )
    chex.assert_trees_all_equal(k_pages, v_pages)
    in_slots = k_pages.transpose(np.argsort(AXES[kv_layout])).swapaxes(1, 2).reshape(48, 2, 64)
    assert (np.asarray(in_slots[slots]).view(np.uint8) == np.asarray(quantized).view(np.uint8)).all()

    # A pool of values, quantized whole, is what its tokens are when written with the same scales.
    values = jnp.zeros((48, 2, 64)).at[slots].set(tokens).reshape(3, 16, 2, 64).swapaxes(1, 2)
    values = values.transpose(AXES[kv_layout])
    whole, whole_scale = kv_quantize(values, dtype, granularity=granularity, kv_layout=kv_layout)
    assert (np.asarray(whole).view(np.uint8) == np.asarray(k_pages).view(np.uint8)).all()
    chex.assert_trees_all_equal(whole_scale, scales[0] if scales else scale)

    q, table = data((1, 4, 64), seed=2), PageTable.from_block_tables([[2, 0, 1]], [40])
    attend = functools.partial(paged_attention, q, page_table=table, kv_layout=kv_layout)
    out = attend(k_pages=whole, v_pages=whole, k_scale=whole_scale, v_scale=whole_scale)
    exact, _ = dequantize(whole, whole_scale, AXES[kv_layout].index(1))
    exact = jnp.asarray(reference.paged_attention(q, exact, exact, table, kv_layout=kv_layout))
    chex.assert_trees_all_close(out, exact, rtol=2e-4, atol=2e-4 * float(jnp.abs(exact).max()))


def test_new_tokens_of_a_contiguous_cache():
    new = data((2, 3, 2, 64))  # [batch, num_new, num_kv_heads, head_dim]
    cache = jnp.zeros((2, 2, 16, 64), jnp.int8)
    scale_cache = jnp.zeros(cache.shape[:-1])
    for granularity in GRANULARITIES:
        quantized, scale = kv_quantize(new, jnp.int8, granularity=granularity, kv_layout="NHD")
        scales = scale_cache if granularity == "token" else None
        k_cache, *_ = append_kv(
            cache,
            cache,
            new,
            new,
            [5, 0],
            k_scale=scale,
            v_scale=scale,
            k_scale_cache=scales,
            v_scale_cache=scales,
        )
        chex.assert_trees_all_equal(k_cache[0, :, 5:8], quantized[0].swapaxes(0, 1))
        chex.assert_trees_all_equal(k_cache[1, :, :3], quantized[1].swapaxes(0, 1))


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
def test_what_is_all_zero_has_scale_1(dtype):
    x = data().at[1, 0, 3].set(0.0).at[:, 1].set(-0.0)
    for granularity in GRANULARITIES:
        quantized, scale = kv_quantize(x, dtype, granularity=granularity)
        assert np.isfinite(np.asarray(quantized).astype(np.float32)).all()
        if granularity == "token":
            assert float(scale[1, 0, 3]) == 1
            assert (scale[:, 1] == 1).all()
        elif granularity == "head":
            assert float(scale[1]) == 1
        assert float(kv_scale(jnp.zeros(SHAPE), dtype, granularity=granularity).min()) == 1
    empty = kv_quantize(jnp.zeros((0, 2, 64)), dtype, granularity="head")
    chex.assert_trees_all_equal(empty, (jnp.zeros((0, 2, 64), jnp.dtype(dtype)), jnp.ones(2)))


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_values_that_are_not_finite_have_no_part_in_the_scale(dtype, granularity):
    x = data()
    holes = [(0, 0, 0, 5), (1, 1, 2, 7), (2, 0, 15, 63)]
    for hole, value in zip(holes, (jnp.nan, jnp.inf, -jnp.inf), strict=True):
        x = x.at[hole].set(value)
    x = x.at[2, 1, 4].set(jnp.nan)
    quantized, scale = kv_quantize(x, dtype, granularity=granularity)
    chex.assert_trees_all_equal(
        scale, kv_scale(jnp.nan_to_num(x, posinf=0, neginf=0), dtype, granularity=granularity)
    )
    stored = [float(quantized[hole]) for hole in holes]
    largest = float(ml_dtypes.iinfo(dtype).min) if dtype == "int8" else -LARGEST[dtype]
    np.testing.assert_equal(stored, [0.0 if dtype == "int8" else np.nan, LARGEST[dtype], largest])


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("amax", [1e-45, 1e-40, 1.2e-38, 1e-37, 1e-30, 1e30, 3.4e38])
def test_scales_of_the_smallest_and_largest_values_are_normal(dtype, amax):
    x = jnp.full((1, 1, 4), amax, jnp.float32)
    quantized, scale = kv_quantize(x, dtype, granularity="token")
    reciprocal = np.float32(1) / np.asarray(scale)
    assert np.asarray(scale) >= np.finfo(np.float32).tiny
    assert 0 < reciprocal < np.inf
    assert np.isfinite(np.asarray(quantized).astype(np.float32)).all()
    if amax >= 1e-30:
        back, _ = dequantize(quantized, scale, heads_axis=1)
        np.testing.assert_allclose(back, x, rtol=1e-6)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_jit_and_vmap_give_the_same_bits(dtype, granularity):
    x = data((4, *SHAPE))
    function = functools.partial(kv_quantize, dtype=jnp.dtype(dtype), granularity=granularity)
    each = [jax.tree.map(np.asarray, function(one)) for one in x]
    for got in ([jax.jit(function)(one) for one in x], list(zip(*jax.vmap(function)(x), strict=True))):
        for (stored, scale), (expected, expected_scale) in zip(got, each, strict=True):
            assert (np.asarray(stored).view(np.uint8) == expected.view(np.uint8)).all()
            chex.assert_trees_all_equal(np.asarray(scale), expected_scale)


def test_one_trace_serves_a_shape():
    function = jax.jit(chex.assert_max_traces(lambda x: kv_scale(x, jnp.int8), n=1))
    assert float(function(jnp.ones((5, 2, 8)))) != float(function(2 * jnp.ones((5, 2, 8))))


def test_symbolic_shapes():
    (tokens,) = jax.export.symbolic_shape("tokens")
    x = jax.ShapeDtypeStruct((tokens, 2, 64), jnp.float32)
    for granularity in GRANULARITIES:
        function = jax.jit(functools.partial(kv_quantize, dtype=jnp.int8, granularity=granularity))
        exported = jax.export.export(function)(x)
        values = data((5, 2, 64))
        chex.assert_trees_all_equal(exported.call(values), function(values))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": jnp.ones((2, 64))},
            r"x: expected shape \[num_tokens, num_kv_heads, head_dim\] or .*got shape",
        ),
        ({"x": jnp.ones((2, 64), jnp.int8)[None]}, "x: expected a dtype of .*, got dtype int8"),
        ({"x": "1"}, "x: expected an array, got str"),
        ({"dtype": jnp.bfloat16}, r"dtype: expected one of \('float8_e4m3fn', .*bfloat16"),
        ({"dtype": "fp8"}, "dtype: expected one of .*, got 'fp8'"),
        ({"dtype": None}, "dtype: expected one of .*, got None"),
        ({"granularity": "page"}, r"granularity: expected one of \('tensor', 'head', 'token'\), got 'page'"),
        ({"granularity": None}, "granularity: expected one of .*, got None"),
        ({"kv_layout": "NDH"}, "kv_layout: expected one of .*, got 'NDH'"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    arguments = {"x": jnp.ones((5, 2, 64)), "dtype": jnp.int8} | changes
    x, dtype = arguments.pop("x"), arguments.pop("dtype")
    for function in (kv_scale, kv_quantize):
        with pytest.raises(ValueError, match=f"^{message}"):
            function(x, dtype, **arguments)
