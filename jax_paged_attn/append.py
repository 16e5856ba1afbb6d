"""Writing new tokens into a cache, paged or contiguous, in place where the caller donates it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import dispatch, rope, validation
from jax_paged_attn.calls import append
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import Ints


def append_paged_kv(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    slot_mapping: Ints,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    kv_layout: str = "HND",
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, ...]:
    """Write new keys and values into slots of a page pool.

    In place, without a copy of the pool, where the caller's ``jax.jit`` donates `k_pages` and `v_pages`
    (``donate_argnums``) or carries them through a ``jax.lax.scan``; otherwise the caller's arrays stay as
    they are. (On the CPU, XLA copies pools of float8.) All other slots keep their bits. Of tokens with equal
    slots the last one is kept.

    Under `jax.vmap` each element has a pool of its own, also where all are given the same one, as JAX's
    semantics want it: to write the tokens of many rows into one pool, pass them all to one call. Mapped pools
    of the layout HPND are written one after another, with copies.

    Parameters
    ----------
    k_pages, v_pages : float or int8
        The pool; v may have its own head_dim, and a dtype of its own. By `kv_layout`:
        "HND" [num_pages, num_kv_heads, page_size, head_dim],
        "NHD" [num_pages, page_size, num_kv_heads, head_dim],
        "HPND" [num_kv_heads, num_pages, page_size, head_dim].
        Of k_new's dtype, or float8_e4m3fn, float8_e5m2 or int8: then values are quantized, as
        ``round(k_new * (1 / k_scale))`` in float32, to nearest even. Values too large for the dtype saturate;
        NaN stays NaN, but becomes 0 in int8.
    k_new, v_new : float[num_tokens, num_kv_heads, head_dim]
        bfloat16, float16 or float32.
    slot_mapping : int[num_tokens]
        Slot of each token: ``page_id * page_size + offset``. Negative slots, and those past the pool, are
        skipped. `jax_paged_attn.slot_mapping` computes it from a page table.
    k_scale, v_scale : float, optional
        Of a quantized pool: a scalar, one a head [num_kv_heads], or one a token and head
        [num_tokens, num_kv_heads], which `k_scale_pages` and `v_scale_pages` then keep. None is 1.
    k_scale_pages, v_scale_pages : float32, optional
        Pools of the scales of tokens, in the shape of k_pages without head_dim.
    kv_layout : str
        Order of the pool's axes.
    validate_values : bool
        Also check that no slot lies past the pool and that scales are positive and finite: ValueError for
        concrete arrays, `jax.experimental.checkify` checks for traced ones.
    implementation : str, optional
        "mosaic_gpu" (a Pallas kernel; interpreted on CPU) or "xla"; None takes the first that can run.
    config : optional
        The chosen implementation's own ``Config``; None takes its default.

    Returns
    -------
    k_pages, v_pages
        Followed by the pools of scales that were given.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.
    NotImplementedError
        If the `implementation` asked for can't run this call, with the reason; or on differentiation.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import append_paged_kv
    >>> k_pages, v_pages = jnp.zeros((2, 3, 2, 16, 64))  # 3 pages, 2 kv heads, 16 tokens a page
    >>> k_new = v_new = jnp.ones((2, 2, 64))
    >>> k_pages, v_pages = append_paged_kv(k_pages, v_pages, k_new, v_new, [37, -1])
    >>> k_pages[2, 0, 4:7, 0].tolist()  # slot 37 is slot 5 of page 2
    [0.0, 1.0, 0.0]
    """
    operands = _as_operands(
        k_pages, v_pages, k_new, v_new, slot_mapping, k_scale, v_scale, k_scale_pages, v_scale_pages
    )
    problem = append.describe(operands, kv_layout=kv_layout, names=_PAGED_NAMES)
    return _run(problem, operands, validate_values, implementation, config)


def rope_append_paged_kv(
    q: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    positions: Ints,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    slot_mapping: Ints,
    *,
    inv_freq: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    kv_layout: str = "HND",
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, ...]:
    """Rotate q and k by their positions and write k and v into a page pool.

    "mosaic_gpu" does it in one kernel for up to 16384 tokens, if pairs aren't `interleaved`.

    The same as `apply_rope` of q and of k, followed by `append_paged_kv`: a rotated k is rounded once, to the
    pool's dtype. q is rotated for skipped tokens too.

    Parameters
    ----------
    q : float[num_tokens, num_q_heads, head_dim]
        Of k_new's dtype.
    k_new, v_new, k_pages, v_pages, slot_mapping
        As in `append_paged_kv`, where the remaining options are described too.
    positions : int[num_tokens]
        Of each token in its sequence.
    inv_freq, cos_sin, rotary_dim, interleaved
        As in `apply_rope`.
    validate_values : bool
        As in `append_paged_kv`, and that positions lie in the table.

    Returns
    -------
    q, k_pages, v_pages
        Followed by the pools of scales that were given.

    Raises
    ------
    ValueError, NotImplementedError
        As `append_paged_kv`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import rope_append_paged_kv, rope_frequencies
    >>> k_pages, v_pages = jnp.zeros((2, 3, 2, 16, 64))
    >>> q, k_new, v_new = jnp.ones((1, 8, 64)), jnp.ones((1, 2, 64)), jnp.ones((1, 2, 64))
    >>> q, k_pages, v_pages = rope_append_paged_kv(
    ...     q, k_new, v_new, [5], k_pages, v_pages, [37], inv_freq=rope_frequencies(64)
    ... )
    >>> bool((k_pages[2, 0, 5] == q[0, 0]).all())
    True
    """
    operands = _as_operands(
        k_pages, v_pages, k_new, v_new, slot_mapping, k_scale, v_scale, k_scale_pages, v_scale_pages
    )
    problem = append.describe(operands, kv_layout=kv_layout, names=_PAGED_NAMES)
    frequencies = rope.as_frequencies(inv_freq, cos_sin, rotary_dim, problem.head_dim)
    rotation = append.RotationOperands(
        validation.as_array("q", q), validation.as_int32("positions", positions), frequencies
    )
    validation.check_bool("interleaved", interleaved)
    problem = append.describe_rotation(problem, rotation, interleaved=interleaved)
    return _run(problem, operands._replace(rotation=rotation), validate_values, implementation, config)


def append_kv(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    kv_lens: Ints,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_cache: ArrayLike | None = None,
    v_scale_cache: ArrayLike | None = None,
    kv_layout: str = "HND",
    validate_values: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[jax.Array, ...]:
    """Write new keys and values behind each row's own in a contiguous cache.

    In place where the caller donates the cache, as `append_paged_kv`, whose other options are the same.

    Parameters
    ----------
    k_cache, v_cache : float or int8
        By `kv_layout`: "HND" [batch, num_kv_heads, max_kv_len, head_dim],
        "NHD" [batch, max_kv_len, num_kv_heads, head_dim]; without the batch axis in the unbatched form.
    k_new, v_new : float[batch, num_new, num_kv_heads, head_dim] or float[num_new, num_kv_heads, head_dim]
        Token i of row b goes to position ``kv_lens[b] + i``; one past max_kv_len is dropped.
    kv_lens : int[batch] or int scalar
        Tokens of each row before the append. A row of negative length is left alone.
    k_scale, v_scale : float, optional
        Of a quantized cache, as in `append_paged_kv`; one a token and head has the shape of k_new without
        head_dim.
    k_scale_cache, v_scale_cache : float32, optional
        The scales of tokens, in the shape of k_cache without head_dim.
    kv_layout : str
        "HND" or "NHD".
    validate_values : bool
        Also check that lengths are not negative and new tokens fit, and that scales are positive.

    Returns
    -------
    k_cache, v_cache
        Followed by the caches of scales that were given.

    Raises
    ------
    ValueError, NotImplementedError
        As `append_paged_kv`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_paged_attn import append_kv
    >>> k_cache, v_cache = jnp.zeros((2, 2, 2, 32, 64))
    >>> k_new = v_new = jnp.ones((2, 1, 2, 64))  # one token a row
    >>> k_cache, v_cache = append_kv(k_cache, v_cache, k_new, v_new, [3, 32])
    >>> k_cache[:, 0, 3, 0].tolist(), int(k_cache[1].sum())  # the second row is full
    ([1.0, 0.0], 0)
    """
    k_cache, v_cache = validation.as_array("k_cache", k_cache), validation.as_array("v_cache", v_cache)
    k_new, v_new = validation.as_array("k_new", k_new), validation.as_array("v_new", v_new)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    scale_caches = {"k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
    scales, scale_caches = (
        {name: validation.as_optional_array(name, x) for name, x in given.items()}
        for given in (scales, scale_caches)
    )
    kv_lens = validation.as_int32("kv_lens", kv_lens)
    validation.check_layout(kv_layout, ("HND", "NHD"))
    validation.check_bool("validate_values", validate_values)
    # Checked as they were given; then everything has a batch axis and tokens one axis.
    axes = "[batch, num_new, num_kv_heads, head_dim] or [num_new, num_kv_heads, head_dim]"
    validation.check(k_new.ndim in (3, 4), "k_new", f"shape {axes}", f"shape {k_new.shape}")
    rows, num_new = k_new.shape[:-3], k_new.shape[-3]
    axes = "num_kv_heads, max_kv_len" if kv_layout == "HND" else "max_kv_len, num_kv_heads"
    expected = f"shape [{'batch, ' * len(rows)}{axes}, head_dim]"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        validation.check(cache.ndim == k_new.ndim, name, expected, f"shape {cache.shape}")
    expected = f"the batch of k_new, {rows}"
    validation.check(k_cache.shape[:-3] == rows, "k_cache", expected, f"{k_cache.shape[:-3]}")
    heads_axis, tokens_axis = (-3, -2) if kv_layout == "HND" else (-2, -3)
    num_kv_heads, max_kv_len = k_cache.shape[heads_axis], k_cache.shape[tokens_axis]
    validation.check_shape("k_new", k_new, (*rows, num_new, num_kv_heads, k_cache.shape[-1]))
    validation.check_shape("v_new", v_new, (*rows, num_new, num_kv_heads, v_cache.shape[-1]))
    for name, scale in scales.items():
        if scale is not None:
            shapes = ((), (num_kv_heads,), k_new.shape[:-1])
            expected = " or ".join(map(str, shapes))
            validation.check(scale.shape in shapes, name, f"shape {expected}", f"shape {scale.shape}")
    for name, cache in scale_caches.items():
        if cache is not None:
            validation.check_shape(name, cache, k_cache.shape[:-1])
    validation.check(kv_lens.shape in ((), rows), "kv_lens", f"shape {rows} or ()", f"shape {kv_lens.shape}")
    if validate_values:
        check_room(kv_lens, num_new, max_kv_len)

    def add_row(x):
        return x if rows or x is None else x[None]

    def flatten(x):
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def flatten_scale(scale):
        return scale if scale is None or scale.ndim < 2 else flatten(add_row(scale))

    k_cache, v_cache, k_new, v_new = (add_row(x) for x in (k_cache, v_cache, k_new, v_new))
    batch = k_new.shape[0]
    # Row b is page b: a contiguous cache is a paged one whose page is the whole row.
    operands = append.Operands(
        k_cache,
        v_cache,
        flatten(k_new),
        flatten(v_new),
        slots_behind(kv_lens, batch, num_new, max_kv_len),
        k_scale=flatten_scale(scales["k_scale"]),
        v_scale=flatten_scale(scales["v_scale"]),
        k_scale_pages=add_row(scale_caches["k_scale_cache"]),
        v_scale_pages=add_row(scale_caches["v_scale_cache"]),
    )
    problem = append.describe(operands, kv_layout=kv_layout, names=_CONTIGUOUS_NAMES)
    results = _run(problem, operands, validate_values, implementation, config)
    return results if rows else tuple(result[0] for result in results)


def check_room(kv_lens: jax.Array, num_new: int, max_kv_len: int) -> None:
    """Check that new tokens fit behind those that the rows of a contiguous cache have."""
    _, (lens,) = validation.value_module(kv_lens)
    fits = (lens >= 0) & (lens <= max_kv_len - num_new)
    room = f"values in [0, {max_kv_len - num_new}]"
    expected = f"{room}, as {num_new} tokens come to max_kv_len={max_kv_len}"
    validation.check_values(fits.reshape((-1,)), "kv_lens", expected, lens.reshape((-1,)))


def slots_behind(kv_lens: jax.Array, batch: int, num_new: int, max_kv_len: int) -> jax.Array:
    """Slots of the tokens that follow each row's own, [batch * num_new]; -1 past its end."""
    num_slots = batch * max_kv_len
    fits = jax.export.is_symbolic_dim(num_slots) or num_slots < 2**31
    got = f"{batch} of {max_kv_len}"
    validation.check(fits, "k_cache", "fewer than 2**31 tokens in all rows", got)
    return _slots_behind(kv_lens, batch, num_new, max_kv_len)


# Jitted, so that an eager call is one program.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _slots_behind(kv_lens: jax.Array, batch: int, num_new: int, max_kv_len: int) -> jax.Array:
    kv_lens = jnp.broadcast_to(kv_lens, (batch,))[:, None]
    room = max_kv_len - kv_lens  # compared with the token's index: a sum could overflow
    token = jnp.arange(num_new, dtype=jnp.int32)[None]
    row_start = max_kv_len * jnp.arange(batch, dtype=jnp.int32)[:, None]
    slots = jnp.where((kv_lens >= 0) & (token < room), row_start + kv_lens + token, -1)
    return slots.reshape(batch * num_new)


def slot_mapping(
    page_table: PageTable,
    batch_indices: Ints,
    positions: Ints,
    *,
    page_size: int,
    validate_values: bool = False,
) -> jax.Array:
    """Look up the slots of tokens in a page table.

    Parameters
    ----------
    page_table : PageTable
        With ``kv_lens`` as they are after the append. An unbatched table has one row.
    batch_indices : int[num_tokens]
        Row of each token.
    positions : int[num_tokens]
        Of each token in its row.
    page_size : int
        Tokens a page.
    validate_values : bool
        Also check that every token lies in a row: ValueError for concrete arrays,
        `jax.experimental.checkify` checks for traced ones.

    Returns
    -------
    int32[num_tokens]
        ``page_id * page_size + offset``, or -1 for a row that doesn't exist, a position outside
        ``[0, kv_lens)`` or past the row's own pages, and a page id below 0: what `append_paged_kv` skips.

    Raises
    ------
    ValueError
        If an argument is wrong; the message names it, what was expected and what came.

    Examples
    --------
    >>> page_table = PageTable.from_block_tables([[7, 2], [4, -1]], [20, 3])
    >>> slot_mapping(page_table, [0, 1, 1], [19, 2, 3], page_size=16).tolist()
    [35, 66, -1]
    """
    page_table = validation.as_page_table(page_table)
    page_table = page_table if page_table.kv_lens.ndim else page_table.as_batched()
    batch_indices = validation.as_int32("batch_indices", batch_indices)
    positions = validation.as_int32("positions", positions)
    validation.check(
        batch_indices.ndim == 1, "batch_indices", "shape [num_tokens]", f"shape {batch_indices.shape}"
    )
    validation.check_shape("positions", positions, batch_indices.shape)
    validation.check_positive_int("page_size", page_size, 2**31 - 1)
    page_size = int(page_size)  # a numpy integer would widen what it multiplies
    validation.check_bool("validate_values", validate_values)
    slots = _look_up(page_table, batch_indices, positions, page_size)
    if validate_values:
        _, (found, at) = validation.value_module(slots, positions)
        expected = "rows of the page table, positions in [0, kv_lens), and page ids of at least 0"
        validation.check_values(found >= 0, "batch_indices, positions", expected, at)
    return slots


@functools.partial(jax.jit, static_argnums=3)
def _look_up(
    page_table: PageTable, batch_indices: jax.Array, positions: jax.Array, page_size: int
) -> jax.Array:
    batch, num_entries = page_table.kv_lens.shape[0], page_table.indices.shape[0]
    if batch == 0 or num_entries == 0:
        return jnp.full_like(positions, -1)
    row_starts, kv_lens = page_table.clipped(page_size)
    row = jnp.clip(batch_indices, 0, batch - 1)
    found = (row == batch_indices) & (positions >= 0) & (positions < kv_lens[row])
    entry = jnp.where(found, row_starts[row] + positions // page_size, 0)
    page = page_table.indices[jnp.clip(entry, 0, num_entries - 1)]
    # A slot past int32 is past any pool.
    found &= (page >= 0) & (page < (2**31 - 1) // page_size)
    return jnp.where(found, page * page_size + positions % page_size, -1)


_PAGED_NAMES = {
    name: name for name in ("k_pages", "v_pages", "k_new", "v_new", "k_scale_pages", "v_scale_pages")
}
_CONTIGUOUS_NAMES = {name: name.replace("pages", "cache") for name in _PAGED_NAMES}


def _as_operands(
    k_pages, v_pages, k_new, v_new, slots, k_scale, v_scale, k_scale_pages, v_scale_pages
) -> append.Operands:
    return append.Operands(
        validation.as_array("k_pages", k_pages),
        validation.as_array("v_pages", v_pages),
        validation.as_array("k_new", k_new),
        validation.as_array("v_new", v_new),
        validation.as_int32("slot_mapping", slots),
        k_scale=validation.as_optional_array("k_scale", k_scale),
        v_scale=validation.as_optional_array("v_scale", v_scale),
        k_scale_pages=validation.as_optional_array("k_scale_pages", k_scale_pages),
        v_scale_pages=validation.as_optional_array("v_scale_pages", v_scale_pages),
    )


def _run(
    problem: append.Problem,
    operands: append.Operands,
    validate_values: bool,
    implementation: str | None,
    config: Any,
) -> tuple[jax.Array, ...]:
    validation.check_bool("validate_values", validate_values)
    if validate_values:
        append.check_slots(problem, operands.slots)
        validation.check_scales(k_scale=operands.k_scale, v_scale=operands.v_scale)
        if operands.rotation is not None:
            rope.check_positions(operands.rotation.positions, operands.rotation.frequencies)
    operands = operands._replace(k_scale=_as_scale(operands.k_scale), v_scale=_as_scale(operands.v_scale))
    results = dispatch.run(append.APPEND, problem, operands, implementation=implementation, config=config)
    ordered = (results.q, results.k_pages, results.v_pages, results.k_scale_pages, results.v_scale_pages)
    return tuple(result for result in ordered if result is not None)


def _as_scale(scale: jax.Array | None) -> jax.Array | None:
    """A float32 array with an axis."""
    return None if scale is None else jnp.atleast_1d(scale.astype(jnp.float32))
