"""The attention of rows over a cache: what is static about a call, its operands, its vmapped form."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.calls.modifiers import Modifiers, first_visible
from jax_paged_attn.dispatch import Operation
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import LAYOUT_AXES, QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one batched call. Hashable; dimensions may be symbolic (`jax.export`).

    Attributes
    ----------
    batch, num_q_heads, num_kv_heads, head_dim, v_head_dim : int
        Sizes of the query and of the cache's heads.
    q_len : int
        Query tokens a row, the last of which sits at its last key.
    causal : bool
        Whether a query sees no key after its own.
    given : tuple[str, ...]
        Names of the `Modifiers` that the call has.
    mask_len : int
        Keys that ``mask`` decides about; 0 without one.
    page_size, num_pages, num_entries : int
        Tokens a page, pages in the pool, entries in ``page_table.indices``.
    dtype, k_dtype, v_dtype : numpy.dtype
        Of the query and the output, of the keys, of the values.
    k_scale, v_scale : str or None
        What the scales of a quantized cache belong to: "head" or "token"; None is a scale of 1.
    kv_layout : str
        A key of `LAYOUT_AXES`.
    return_lse : bool
        Whether the log-sum-exp is wanted.
    num_splits : int or None
        Runs that each row's tiles are cut into; None leaves it to the implementation.
    contiguous : bool
        Whether row b is page b, whole: then the page table says nothing but ``kv_lens``.
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
    k_dtype: np.dtype
    v_dtype: np.dtype
    k_scale: str | None = None
    v_scale: str | None = None
    kv_layout: str = "HND"
    q_len: int = 1
    causal: bool = True
    given: tuple[str, ...] = ()
    mask_len: int = 0
    return_lse: bool = False
    num_splits: int | None = None
    contiguous: bool = False

    @property
    def group_size(self) -> int:
        """Query heads a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_symbolic(self) -> bool:
        """Whether any dimension is symbolic."""
        return validation.is_symbolic(self)

    @property
    def is_empty(self) -> bool:
        """Whether the shapes alone say that no row has a token."""
        sizes = (self.batch, self.q_len, self.page_size, self.num_pages, self.num_entries)
        return any(dim == 0 for dim in sizes)

    def nonempty(self) -> Self:
        """Return the smallest problem of this kind that isn't empty."""
        sizes = ("batch", "q_len", "page_size", "num_pages", "num_entries")
        return dataclasses.replace(self, **{name: max(getattr(self, name), 1) for name in sizes})


class Operands(NamedTuple):
    """What an implementation computes with, of one batched call: q [batch, q_len, num_q_heads, head_dim].

    Scales are float32[num_kv_heads], or one a token, in the cache's shape without head_dim; or None.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: PageTable
    sm_scale: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    modifiers: Modifiers = Modifiers()


def nothing(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Yield (out, lse) of rows without keys."""
    rows = (problem.batch, problem.q_len, problem.num_q_heads)
    sinks = operands.modifiers.sinks
    lse = jnp.broadcast_to(jnp.float32(-jnp.inf) if sinks is None else sinks, rows)
    return jnp.zeros((*rows, problem.v_head_dim), problem.dtype), lse if problem.return_lse else None


def fold[P: Problem](
    problem: P, size: int, batched: Operands, operands: Operands
) -> tuple[P, Operands] | None:
    """Fold a mapped axis of `size` into the rows, if it can join them without moving a pool.

    Kernels then see one batch to balance, read a shared cache once, and need no batching of their own.

    Row b of element i becomes row ``i * batch + b``. A mapped pool becomes one pool, where element i's pages
    begin at ``i * num_pages``, and page ids move along. Where only one of K and V is mapped, the other is
    repeated.
    """
    # Scales of tokens lie in pools of their own.
    scales = {
        name: getattr(operands, name) for name in ("k_scale", "v_scale") if getattr(problem, name) == "token"
    }
    pools = ("k_pages", "v_pages", *scales)
    pools_mapped = any(getattr(batched, name) for name in pools)
    head_scales_mapped = any(getattr(batched, name) for name in {"k_scale", "v_scale"} - scales.keys())
    if (
        batched.sm_scale
        or any(batched.modifiers.of_the_call.values())
        or head_scales_mapped
        or (pools_mapped and LAYOUT_AXES[problem.kv_layout][0] != "num_pages")
    ):
        return None

    def mapped(array, has_axis):
        return array if has_axis else jnp.broadcast_to(array, (size, *array.shape))

    def join(array):
        return array.reshape(size * array.shape[1], *array.shape[2:])

    table = jax.tree.map(mapped, operands.page_table, batched.page_table)
    of_rows = {
        name: join(mapped(array, getattr(batched.modifiers, name)))
        for name, array in operands.modifiers.of_rows.items()
    }
    # Clipped before they move, or a row could reach into another element's entries or pages.
    row_starts, kv_lens = jax.vmap(lambda row: row.clipped(problem.page_size))(table)
    row_pages = jnp.clip(table.row_pages, 0, problem.num_entries - row_starts)
    element = jnp.arange(size, dtype=jnp.int32)[:, None]
    num_pages = problem.num_pages
    moved = {name: getattr(operands, name) for name in ("k_pages", "v_pages", "k_scale", "v_scale")}
    if pools_mapped:
        moved |= {name: join(mapped(moved[name], getattr(batched, name))) for name in pools}
        indices = jnp.clip(table.indices, 0, num_pages - 1) + element * num_pages
        num_pages = size * num_pages
    else:
        indices = table.indices
    if pools_mapped or batched.page_table.indices:
        indices, row_starts = join(indices), row_starts + element * problem.num_entries
    else:  # all rows share one list of entries
        indices = operands.page_table.indices
    folded = dataclasses.replace(
        problem,
        batch=size * problem.batch,
        num_pages=num_pages,
        num_entries=indices.shape[0],
        contiguous=problem.contiguous and pools_mapped,
    )
    return folded, Operands(
        q=join(mapped(operands.q, batched.q)),
        page_table=PageTable(indices, join(row_starts), join(row_pages), join(kv_lens)),
        sm_scale=operands.sm_scale,
        modifiers=operands.modifiers._replace(**of_rows),
        **moved,
    )


def _scale_kind(
    name: str, scale: jax.Array | None, cache_name: str, cache: jax.Array, num_kv_heads: int
) -> str | None:
    """Check a scale; one of the whole tensor counts as one of each head."""
    kinds = {(): "tensor", (num_kv_heads,): "head", cache.shape[:-1]: "token"}
    kind = validation.scale_kind(name, scale, cache_name, cache, kinds)
    return "head" if kind == "tensor" else kind


ATTENTION = Operation("attention", ("paged_attention", "decode_attention"), nothing, fold)


def describe(
    q: jax.Array | jax.ShapeDtypeStruct,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    modifiers: Modifiers,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    causal: bool,
    kv_layout: str,
    return_lse: bool,
    num_splits: int | None,
    contiguous: bool,
    cache_names: tuple[str, str] = ("k_pages", "v_pages"),
) -> Problem:
    """Check the shapes, dtypes and flags of a batched call, with q of four axes, and describe it.

    `modifiers` are checked already. `cache_names` are the names that the caller knows the caches by.
    """
    k_name, v_name = cache_names
    validation.check_layout(kv_layout)
    validation.check_bool("causal", causal)
    validation.check_bool("return_lse", return_lse)
    if num_splits is not None:
        validation.check_positive_int("num_splits", num_splits)
    validation.check_cache_shapes(k_pages, v_pages, kv_layout, cache_names)
    validation.check(
        q.dtype.name in validation.DTYPES, "q", f"a dtype of {validation.DTYPES}", f"dtype {q.dtype}"
    )
    for name, cache in zip(cache_names, (k_pages, v_pages), strict=True):
        validation.check(
            cache.dtype == q.dtype or cache.dtype.name in QUANTIZED_DTYPES,
            name,
            f"the dtype of q, {q.dtype}, or one of {QUANTIZED_DTYPES}",
            f"dtype {cache.dtype}",
        )
    batch, q_len, num_q_heads, head_dim = q.shape
    sizes = dict(zip(LAYOUT_AXES[kv_layout], k_pages.shape, strict=True))
    num_kv_heads = sizes["num_kv_heads"]
    validation.check(
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
        validation.check(size != 0, name, "at least one head and head_dim at least 1", "an axis of size 0")
    validation.check(
        num_q_heads % num_kv_heads == 0,
        "q",
        f"num_q_heads divisible by num_kv_heads={num_kv_heads} of {k_name} in {kv_layout=}",
        f"num_q_heads={num_q_heads}",
    )
    validation.check(
        page_table.kv_lens.shape == (batch,),
        "page_table",
        f"{batch} rows, the batch of q",
        f"kv_lens of shape {page_table.kv_lens.shape}",
    )
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
        k_dtype=np.dtype(k_pages.dtype),
        v_dtype=np.dtype(v_pages.dtype),
        k_scale=_scale_kind("k_scale", k_scale, k_name, k_pages, num_kv_heads),
        v_scale=_scale_kind("v_scale", v_scale, v_name, v_pages, num_kv_heads),
        kv_layout=kv_layout,
        q_len=q_len,
        causal=causal,
        given=modifiers.given,
        mask_len=0 if modifiers.mask is None else modifiers.mask.shape[-1],
        return_lse=return_lse,
        num_splits=None if num_splits is None else int(num_splits),
        contiguous=contiguous,
    )


def as_operands(
    problem: Problem,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    modifiers: Modifiers,
    sm_scale: ArrayLike | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> Operands:
    """Convert the scales, of which `problem` says what they belong to, to arrays of their batched form."""
    scale = validation.as_sm_scale(sm_scale, problem.head_dim)
    scale = validation.on_device(scale if isinstance(scale, jax.Array) else np.float32(scale))
    k_scale, v_scale = (
        None if x is None else jnp.broadcast_to(x, x.shape or (problem.num_kv_heads,)).astype(jnp.float32)
        for x in (k_scale, v_scale)
    )
    return Operands(q, k_pages, v_pages, page_table, scale, k_scale, v_scale, modifiers)


def check_values(
    problem: Problem,
    page_table: PageTable,
    modifiers: Modifiers,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    *,
    q_lens: int | jax.Array,
    table_name: str = "page_table",
    lens_name: str = "page_table.kv_lens",
) -> None:
    """Check a batched page table's lengths, entries and used page ids, and values of modifiers and scales.

    `q_lens` are the query tokens of each row, the names those that the caller knows arguments by.
    """
    # Scales of tokens may be anything where no token is.
    wholes = {"k_scale": k_scale, "v_scale": v_scale}
    validation.check_scales(**{n: x for n, x in wholes.items() if getattr(problem, n) != "token"})
    modifiers.check_values(page_table.kv_lens, lens_name)
    num_entries, page_size, num_pages = problem.num_entries, problem.page_size, problem.num_pages
    arrays = (page_table.indices, page_table.row_starts, page_table.row_pages, page_table.kv_lens)
    xp, (indices, row_starts, row_pages, kv_lens) = validation.value_module(*arrays)
    expected = f"rows within the {num_entries} entries of indices"
    inside = (row_pages >= 0) & (row_pages <= num_entries)
    validation.check_values(inside, f"{table_name}.row_pages", expected, row_pages)
    inside = (row_starts >= 0) & (row_starts <= num_entries - xp.clip(row_pages, 0, num_entries))
    validation.check_values(inside, f"{table_name}.row_starts", expected, row_starts)
    # Clipping compares pages rather than tokens: row_pages * page_size can overflow int32.
    used_pages = -(-kv_lens // max(page_size, 1))
    fits = (kv_lens >= 0) & (used_pages <= (row_pages if page_size != 0 else 0))
    most = f"{page_size}" if problem.contiguous else f"row_pages * {page_size}"
    validation.check_values(fits, lens_name, f"values in [0, {most}]", kv_lens)
    # An entry is used if more rows begin at or before it than end there. Pages before the first key that any
    # query sees may be gone.
    begins = xp.clip(row_starts, 0, num_entries)
    ends = begins + xp.clip(used_pages, 0, xp.clip(row_pages, 0, num_entries - begins))
    of_window = modifiers.kv_starts, modifiers.window_left
    first = first_visible(q_lens, problem.mask_len, page_table.kv_lens, *of_window)
    if first is not None:
        xp, (indices, begins, ends, first) = validation.value_module(indices, begins, ends, first)
        begins = xp.minimum(begins + xp.clip(first, 0, None) // max(page_size, 1), ends)
    counts = [xp.cumsum(_histogram(xp, edges, num_entries)) for edges in (begins, ends)]
    in_range = (indices >= 0) & (indices < num_pages)
    expected = f"used page ids in [0, {num_pages - 1}]"
    used_in_range = (counts[0] <= counts[1]) | in_range
    validation.check_values(used_in_range, f"{table_name}.indices", expected, indices)


def _histogram(xp: Any, values: Any, size: int) -> Any:
    """Count each of ``range(size)`` in values of at least 0; larger ones are left out."""
    if xp is np:
        return np.bincount(values, minlength=size)[:size]
    return jnp.zeros(size, jnp.int32).at[values].add(1, mode="drop")
