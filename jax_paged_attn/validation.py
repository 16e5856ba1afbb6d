"""Checks of arguments that all public functions share.

Static checks look at shapes and dtypes only and work on symbolic dimensions: they compare dimensions with
``==`` and never call ``int`` on them. Value checks are opt-in: they raise ValueError on concrete arrays and
become `jax.experimental.checkify` checks on traced ones.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from jax_paged_attn.page_table import PageTable

# What an integer argument may be: lists too, as tables are often built on the host.
type Ints = ArrayLike | Sequence[Any]

DTYPES = ("bfloat16", "float16", "float32")
QUANTIZED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")

LAYOUT_AXES = {
    "HND": ("num_pages", "num_kv_heads", "page_size", "head_dim"),
    "NHD": ("num_pages", "page_size", "num_kv_heads", "head_dim"),
    "HPND": ("num_kv_heads", "num_pages", "page_size", "head_dim"),
}

_INT32 = np.iinfo(np.int32)


def check(ok: bool, name: str, expected: str, got: str) -> None:
    """Raise the ValueError of a wrong argument unless `ok`."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def is_symbolic(description: Any) -> bool:
    """Whether a field of a dataclass is a symbolic dimension."""
    # Not dataclasses.astuple: it copies symbolic dimensions, which they don't all survive.
    sizes = (getattr(description, field.name) for field in dataclasses.fields(description))
    return any(jax.export.is_symbolic_dim(size) for size in sizes)


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Check for exactly this shape."""
    check(array.shape == shape, name, f"shape {shape}", f"shape {array.shape}")


def check_bool(name: str, value: Any) -> None:
    """Check for a Python bool, which a static flag must be."""
    expected = "a bool, static under jax.jit (static_argnames)" if isinstance(value, Tracer) else "a bool"
    check(isinstance(value, bool), name, expected, repr(value))


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Check for a Python or numpy integer of at least `least` and, if given, at most `most`."""
    ok = isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)
    ok = ok and int(value) >= least and (most is None or int(value) <= most)
    expected = f"an int of at least {least}" if most is None else f"an int in [{least}, {most}]"
    check(ok, name, expected, repr(value))


def check_positive_int(name: str, value: Any, most: int | None = None) -> None:
    """Check for a Python or numpy integer of at least 1 and, if given, at most `most`."""
    check_int(name, value, 1, most)


def as_array(name: str, value: Any, expected: str = "an array") -> jax.Array:
    """Convert an array-like to a `jax.Array`."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected {expected}, got {type(value).__name__}") from error


def as_optional_array(name: str, value: Any) -> jax.Array | None:
    """Convert an array-like to a `jax.Array`, and None to None."""
    return None if value is None else as_array(name, value)


def as_int32(name: str, value: Any) -> jax.Array:
    """Convert an integer array-like to int32; values outside its range are saturated, not wrapped."""
    if isinstance(value, jax.Array) and value.dtype == np.int32:
        return value
    array = as_integers(name, value, _asarray_in_place)
    limits = jnp.iinfo(array.dtype)
    low, high = max(limits.min, _INT32.min), min(limits.max, _INT32.max)
    if (low, high) != (limits.min, limits.max):
        # A numpy array must be narrowed here: without x64, jnp.asarray would wrap its values.
        xp = jnp if isinstance(array, jax.Array) else np
        array = xp.clip(array, array.dtype.type(low), array.dtype.type(high))
    return jnp.asarray(array.astype(np.int32))


def as_integers(name: str, value: Any, asarray: Callable[[Any], Any] = np.asarray) -> Any:
    """Convert an integer array-like with `asarray`; by default to a numpy array."""
    try:
        array = asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: expected an integer array, got {type(value).__name__}") from error
    if isinstance(value, list | tuple) and array.size == 0:  # an empty list has no dtype to speak of
        array = array.astype(np.int32)
    # To numpy, a timedelta64 is a signed integer.
    ok = jnp.issubdtype(array.dtype, np.integer) and not np.issubdtype(array.dtype, np.timedelta64)
    got = type(value).__name__ if array.dtype == object else f"dtype {array.dtype}"
    check(ok, name, "an integer array", got)
    return array


def _asarray_in_place(value: Any) -> jax.Array | np.ndarray:
    """Keep what is on a device or traced there; anything else becomes a numpy array."""
    if isinstance(value, jax.Array):
        return value
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    return jnp.asarray(value) if traced else np.asarray(value)


def as_sm_scale(sm_scale: Any, head_dim: int) -> float | jax.Array:
    """Check the softmax scale and return it, or the default, as a float32 scalar or what becomes one."""
    if sm_scale is not None:
        return as_real_scalar("sm_scale", sm_scale, "a real scalar or None")
    if jax.export.is_symbolic_dim(head_dim):  # it takes whole powers only, the array of it takes any
        return jnp.asarray(head_dim, jnp.float32) ** -0.5
    return head_dim**-0.5


def as_real_scalar(name: str, value: Any, expected: str = "a real scalar") -> float | jax.Array:
    """Check for a real scalar and return it as a float32 one or what becomes one."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.timedelta64):
        try:
            return float(value)
        except OverflowError as error:
            raise ValueError(f"{name}: expected a real scalar in float32's range, got {value}") from error
    scalar = as_array(name, value, expected)
    real = jnp.issubdtype(scalar.dtype, np.floating) or jnp.issubdtype(scalar.dtype, np.integer)
    check(real, name, expected, f"dtype {scalar.dtype}")
    check(scalar.ndim == 0, name, expected, f"shape {scalar.shape}")
    return scalar.astype(jnp.float32)


def on_device(value: Any) -> jax.Array:
    """Put a scalar on the device by request: JAX moving it by itself would trip a transfer guard."""
    return value if isinstance(value, jax.Array) else jax.device_put(value)


def check_layout(kv_layout: Any, allowed: tuple[str, ...] = tuple(LAYOUT_AXES)) -> None:
    """Check the name of a cache layout."""
    check(
        isinstance(kv_layout, str) and kv_layout in allowed, "kv_layout", f"one of {allowed}", repr(kv_layout)
    )


def check_cache_shapes(
    k_pages: jax.Array,
    v_pages: jax.Array,
    kv_layout: str,
    names: tuple[str, str] = ("k_pages", "v_pages"),
) -> None:
    """Check that K and V have the axes of the layout, and one shape but for head_dim."""
    k_name, v_name = names
    for name, cache in ((k_name, k_pages), (v_name, v_pages)):
        expected = f"shape [{', '.join(LAYOUT_AXES[kv_layout])}], as {kv_layout=}"
        check(cache.ndim == 4, name, expected, f"shape {cache.shape}")
    check(
        v_pages.shape[:-1] == k_pages.shape[:-1],
        v_name,
        f"the shape of {k_name} but for the last axis, {k_pages.shape[:-1]}",
        f"shape {v_pages.shape}",
    )


def scale_kind(
    name: str, scale: Any, cache_name: str, cache: jax.Array, kinds: dict[tuple, str]
) -> str | None:
    """Check the scale of a cache by its shape, of which `kinds` says what each belongs to; None has none."""
    if scale is None:
        return None
    quantized = cache.dtype.name in QUANTIZED_DTYPES
    check(quantized, name, f"None, as {cache_name} isn't quantized", f"a scale for dtype {cache.dtype}")
    floating = jnp.issubdtype(scale.dtype, np.floating)
    check(floating or jnp.issubdtype(scale.dtype, np.integer), name, "real numbers", f"dtype {scale.dtype}")
    shapes = " or ".join(f"{shape} for one a {kind}" for shape, kind in kinds.items())
    check(scale.shape in kinds, name, f"shape {shapes}", f"shape {scale.shape}")
    return kinds[scale.shape]


def as_page_table(page_table: Any, name: str = "page_table") -> "PageTable":
    """Check a page table's own consistency and narrow its fields to int32."""
    # PageTable's constructors use this module, so this import can't stand at the top.
    from jax_paged_attn.page_table import PageTable

    expected = "a PageTable (PageTable.from_block_tables and .from_csr make one)"
    check(isinstance(page_table, PageTable), name, expected, type(page_table).__name__)
    fields = {
        field.name: as_int32(f"{name}.{field.name}", getattr(page_table, field.name))
        for field in dataclasses.fields(PageTable)
    }
    indices, kv_lens = fields["indices"], fields["kv_lens"]
    check(indices.ndim == 1, f"{name}.indices", "shape [num_entries]", f"shape {indices.shape}")
    check(kv_lens.ndim <= 1, f"{name}.kv_lens", "shape [batch] or []", f"shape {kv_lens.shape}")
    for field in ("row_starts", "row_pages"):
        check_shape(f"{name}.{field}", fields[field], kv_lens.shape)
    return PageTable(**fields)


def check_csr_values(indptr: jax.Array, indices: jax.Array, last_page_len: jax.Array, page_size: int) -> None:
    """Check that ``indptr`` rises within ``[0, num_entries]`` and ``last_page_len`` fits the page."""
    xp, (indptr, last_page_len) = value_module(indptr, last_page_len)
    num_entries = indices.shape[0]
    pages = indptr[1:] - indptr[:-1]
    check_values(pages >= 0, "indptr", "a rising array", indptr)
    check_values((indptr >= 0) & (indptr <= num_entries), "indptr", f"values in [0, {num_entries}]", indptr)
    fits = (last_page_len >= 1) & (last_page_len <= page_size)
    expected = f"values in [1, {page_size}], or 0 in a row without pages"
    check_values(xp.where(pages > 0, fits, last_page_len == 0), "last_page_len", expected, last_page_len)


def value_module(*arrays: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """Return numpy and host copies if all arrays are concrete, else jax.numpy and the arrays themselves."""
    if any(isinstance(array, Tracer) for array in arrays):
        return jnp, arrays
    return np, tuple(np.asarray(array) for array in arrays)


def check_values(ok: Any, name: str, expected: str, got: Any) -> None:
    """Raise ValueError if `ok` is concrete and false somewhere; add a checkify check if it is traced.

    A traced check tells the first wrong one only: checkify compares what checks tell by shape, and symbolic
    shapes can't be compared.
    """
    if not isinstance(ok, Tracer):
        check(bool(np.all(ok)), name, expected, str(got))
    elif ok.size != 0:
        first = jnp.argmin(ok)
        message = f"{name}: expected {expected}, got {{got}} at index {{index}}"
        checkify.check(jnp.all(ok), message, got=got[first], index=first)


def check_scales(**scales: Any) -> None:
    """Check that scales are positive and finite."""
    for name, scale in scales.items():
        if scale is not None:
            xp, (scale,) = value_module(scale)
            ok = xp.reshape((scale > 0) & (scale < math.inf), (-1,))
            check_values(ok, name, "positive finite values", xp.reshape(scale, (-1,)))
