"""Checks of arguments, and the static description of a call that they yield.

Static checks look at shapes and dtypes only and work on symbolic dimensions: they compare dimensions with
``==`` and never call ``int`` on them. Value checks are opt-in: they raise ValueError on concrete arrays and
become `jax.experimental.checkify` checks on traced ones.
"""

import dataclasses
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

LAYOUT_AXES = {
    "HND": ("num_pages", "num_kv_heads", "page_size", "head_dim"),
    "NHD": ("num_pages", "page_size", "num_kv_heads", "head_dim"),
    "HPND": ("num_kv_heads", "num_pages", "page_size", "head_dim"),
}

_INT32 = np.iinfo(np.int32)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one batched call. Hashable; dimensions may be symbolic (`jax.export`).

    Attributes
    ----------
    batch, num_q_heads, num_kv_heads, head_dim, v_head_dim : int
        Sizes of the query and of the cache's heads.
    page_size, num_pages, num_entries : int
        Tokens a page, pages in the pool, entries in ``page_table.indices``.
    dtype : numpy.dtype
        Of the query, the cache and the output.
    kv_layout : str
        A key of `LAYOUT_AXES`.
    has_kv_starts, return_lse : bool
        Whether ``kv_starts`` is given; whether the log-sum-exp is wanted.
    num_splits : int or None
        Runs that each row's tiles are cut into; None leaves it to the implementation.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    num_pages: int
    num_entries: int
    dtype: np.dtype
    kv_layout: str = "HND"
    has_kv_starts: bool = False
    return_lse: bool = False
    num_splits: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_symbolic(self) -> bool:
        """Whether any dimension is symbolic."""
        # Not dataclasses.astuple: it copies symbolic dimensions, which they don't all survive.
        sizes = (getattr(self, field.name) for field in dataclasses.fields(self))
        return any(jax.export.is_symbolic_dim(dim) for dim in sizes)

    @property
    def is_empty(self) -> bool:
        """Whether the shapes alone say that no row has a token."""
        return any(dim == 0 for dim in (self.batch, self.page_size, self.num_pages, self.num_entries))


def check(ok: bool, name: str, expected: str, got: str) -> None:
    """Raise the ValueError of a wrong argument unless `ok`."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    """Check for exactly this shape."""
    check(array.shape == shape, name, f"shape {shape}", f"shape {array.shape}")


def check_bool(name: str, value: Any) -> None:
    """Check for a Python bool, which a static flag must be."""
    check(isinstance(value, bool), name, "a bool", repr(value))


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
    check(ok, name, "an integer array", f"dtype {array.dtype}")
    return array


def _asarray_in_place(value: Any) -> jax.Array | np.ndarray:
    """Keep what is on a device or traced there; anything else becomes a numpy array."""
    if isinstance(value, jax.Array):
        return value
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    return jnp.asarray(value) if traced else np.asarray(value)


def as_sm_scale(sm_scale: Any, head_dim: int) -> float | jax.Array:
    """Check the softmax scale and return it, or the default, as a float32 scalar or what becomes one."""
    if sm_scale is None:
        if jax.export.is_symbolic_dim(head_dim):  # it takes whole powers only, the array of it takes any
            return jnp.asarray(head_dim, jnp.float32) ** -0.5
        return head_dim**-0.5
    expected = "a real scalar or None"
    if isinstance(sm_scale, numbers.Real) and not isinstance(sm_scale, bool | np.timedelta64):
        try:
            return float(sm_scale)
        except OverflowError as error:
            raise ValueError(
                f"sm_scale: expected a real scalar in float32's range, got {sm_scale}"
            ) from error
    scale = as_array("sm_scale", sm_scale, expected)
    real = jnp.issubdtype(scale.dtype, np.floating) or jnp.issubdtype(scale.dtype, np.integer)
    check(real, "sm_scale", expected, f"dtype {scale.dtype}")
    check(scale.ndim == 0, "sm_scale", expected, f"shape {scale.shape}")
    return scale.astype(jnp.float32)


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
        check(cache.ndim == 4, name, f"shape [{', '.join(LAYOUT_AXES[kv_layout])}]", f"shape {cache.shape}")
    check(
        v_pages.shape[:-1] == k_pages.shape[:-1],
        v_name,
        f"the shape of {k_name} but for the last axis, {k_pages.shape[:-1]}",
        f"shape {v_pages.shape}",
    )


def as_page_table(page_table: Any) -> "PageTable":
    """Check a page table's own consistency and narrow its fields to int32."""
    # PageTable's constructors use this module, so this import can't stand at the top.
    from jax_paged_attn.page_table import PageTable

    check(isinstance(page_table, PageTable), "page_table", "a PageTable", type(page_table).__name__)
    fields = {
        field.name: as_int32(f"page_table.{field.name}", getattr(page_table, field.name))
        for field in dataclasses.fields(PageTable)
    }
    indices, kv_lens = fields["indices"], fields["kv_lens"]
    check(indices.ndim == 1, "page_table.indices", "shape [num_entries]", f"shape {indices.shape}")
    check(kv_lens.ndim <= 1, "page_table.kv_lens", "shape [batch] or []", f"shape {kv_lens.shape}")
    for name in ("row_starts", "row_pages"):
        check_shape(f"page_table.{name}", fields[name], kv_lens.shape)
    return PageTable(**fields)


def describe(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: "PageTable",
    kv_starts: jax.Array | None,
    *,
    kv_layout: str,
    return_lse: bool,
    num_splits: int | None,
    cache_names: tuple[str, str] = ("k_pages", "v_pages"),
) -> Problem:
    """Check the shapes, dtypes and flags of a batched call and describe it.

    `cache_names` are the names that the caller knows the caches by.
    """
    k_name, v_name = cache_names
    check_layout(kv_layout)
    check_bool("return_lse", return_lse)
    if num_splits is not None:
        check_positive_int("num_splits", num_splits)
    check(q.ndim == 3, "q", "shape [batch, num_q_heads, head_dim]", f"shape {q.shape}")
    check_cache_shapes(k_pages, v_pages, kv_layout, cache_names)
    check(q.dtype.name in DTYPES, "q", f"a dtype of {DTYPES}", f"dtype {q.dtype}")
    for name, cache in zip(cache_names, (k_pages, v_pages), strict=True):
        check(cache.dtype == q.dtype, name, f"the dtype of q, {q.dtype}", f"dtype {cache.dtype}")
    batch, num_q_heads, head_dim = q.shape
    sizes = dict(zip(LAYOUT_AXES[kv_layout], k_pages.shape, strict=True))
    num_kv_heads = sizes["num_kv_heads"]
    check(
        sizes["head_dim"] == head_dim,
        k_name,
        f"the head_dim of q, {head_dim}",
        f"head_dim {sizes['head_dim']}",
    )
    for name, size in (
        ("q", head_dim),
        ("q", num_q_heads),
        (k_name, num_kv_heads),
        (v_name, v_pages.shape[-1]),
    ):
        check(size != 0, name, "at least one head and head_dim at least 1", "an axis of size 0")
    check(
        num_q_heads % num_kv_heads == 0,
        "q",
        f"num_q_heads divisible by num_kv_heads={num_kv_heads}",
        f"num_q_heads={num_q_heads}",
    )
    check(
        page_table.kv_lens.shape == (batch,),
        "page_table",
        f"{batch} rows, the batch of q",
        f"kv_lens of shape {page_table.kv_lens.shape}",
    )
    if kv_starts is not None:
        check_shape("kv_starts", kv_starts, (batch,))
    return Problem(
        batch=batch,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_pages.shape[-1],
        page_size=sizes["page_size"],
        num_pages=sizes["num_pages"],
        num_entries=page_table.indices.shape[0],
        dtype=np.dtype(q.dtype),
        kv_layout=kv_layout,
        has_kv_starts=kv_starts is not None,
        return_lse=return_lse,
        num_splits=None if num_splits is None else int(num_splits),
    )


def check_csr_values(indptr: jax.Array, indices: jax.Array, last_page_len: jax.Array, page_size: int) -> None:
    """Check that ``indptr`` rises within ``[0, num_entries]`` and ``last_page_len`` fits the page."""
    xp, (indptr, last_page_len) = _value_module(indptr, last_page_len)
    num_entries = indices.shape[0]
    pages = indptr[1:] - indptr[:-1]
    _check_values(pages >= 0, "indptr", "a rising array", indptr)
    _check_values((indptr >= 0) & (indptr <= num_entries), "indptr", f"values in [0, {num_entries}]", indptr)
    fits = (last_page_len >= 1) & (last_page_len <= page_size)
    expected = f"values in [1, {page_size}], or 0 in a row without pages"
    _check_values(xp.where(pages > 0, fits, last_page_len == 0), "last_page_len", expected, last_page_len)


def check_values(
    problem: Problem, page_table: "PageTable", kv_starts: jax.Array | None, lens_name: str
) -> None:
    """Check a batched page table's lengths, entries and used page ids, and ``kv_starts``.

    `lens_name` is the name that the caller knows the lengths by.
    """
    num_entries, page_size, num_pages = problem.num_entries, problem.page_size, problem.num_pages
    arrays = (page_table.indices, page_table.row_starts, page_table.row_pages, page_table.kv_lens)
    xp, (indices, row_starts, row_pages, kv_lens) = _value_module(*arrays)
    expected = f"rows within the {num_entries} entries of indices"
    inside = (row_pages >= 0) & (row_pages <= num_entries)
    _check_values(inside, "page_table.row_pages", expected, row_pages)
    inside = (row_starts >= 0) & (row_starts <= num_entries - xp.clip(row_pages, 0, num_entries))
    _check_values(inside, "page_table.row_starts", expected, row_starts)
    # Clipping compares pages rather than tokens: row_pages * page_size can overflow int32.
    used_pages = -(-kv_lens // max(page_size, 1))
    fits = (kv_lens >= 0) & (used_pages <= (row_pages if page_size != 0 else 0))
    _check_values(fits, lens_name, f"values in [0, row_pages * {page_size}]", kv_lens)
    # An entry is used if more rows begin at or before it than end there.
    begins = xp.clip(row_starts, 0, num_entries)
    ends = begins + xp.clip(used_pages, 0, xp.clip(row_pages, 0, num_entries - begins))
    counts = [xp.cumsum(_histogram(xp, edges, num_entries)) for edges in (begins, ends)]
    in_range = (indices >= 0) & (indices < num_pages)
    expected = f"used page ids in [0, {num_pages - 1}]"
    _check_values((counts[0] <= counts[1]) | in_range, "page_table.indices", expected, indices)
    if kv_starts is not None:
        _, (starts, lens) = _value_module(kv_starts, page_table.kv_lens)
        inside = (starts >= 0) & (starts <= lens)
        _check_values(inside, "kv_starts", f"values in [0, {lens_name}]", starts)


def _histogram(xp: Any, values: Any, size: int) -> Any:
    """Count each of ``range(size)`` in values of at least 0; larger ones are left out."""
    if xp is np:
        return np.bincount(values, minlength=size)[:size]
    return jnp.zeros(size, jnp.int32).at[values].add(1, mode="drop")


def _value_module(*arrays: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """Return numpy and host copies if all arrays are concrete, else jax.numpy and the arrays themselves."""
    if any(isinstance(array, Tracer) for array in arrays):
        return jnp, arrays
    return np, tuple(np.asarray(array) for array in arrays)


def _check_values(ok: Any, name: str, expected: str, got: Any) -> None:
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
