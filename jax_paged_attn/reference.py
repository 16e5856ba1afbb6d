"""Float32 oracles in plain jnp: slow, obvious, differentiable.

Each function takes the arguments of the public function of its name and computes in float32 at the highest
precision of matrix products, whatever the dtype of its inputs. It returns float32, but for pools, which keep
their dtype. A row is gathered whole; tokens are written one after the other.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_paged_attn import validation
from jax_paged_attn.page_table import PageTable


def paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: PageTable,
    *,
    mask: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.paged_attention`; other `options` are those of `_attention`.

    Differentiable in q, unquantized pages, sm_scale, soft_cap, slopes, sinks and other scales.
    """
    q = jnp.asarray(q)
    page_size, lead = _page_size(q, k_pages, kv_layout), q.shape[:-2]
    q_len = lead[1] if len(lead) == 2 else 1
    # Rows of one form: [batch, q_len, num_q_heads, head_dim].
    table = page_table if lead else page_table.as_batched()
    q = q.reshape(table.kv_lens.shape[0], q_len, *q.shape[-2:])
    if mask is not None:
        mask = jnp.asarray(mask).reshape(*q.shape[:2], -1)
    _, kv_lens = table.clipped(page_size)
    queries = kv_lens[:, None] - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]
    kv_starts = jnp.broadcast_to(jnp.asarray(0 if kv_starts is None else kv_starts, jnp.int32), kv_lens.shape)
    result = _attention(q, k_pages, v_pages, table, queries, mask, kv_starts, kv_layout=kv_layout, **options)
    out, lse = (x.reshape(*lead, *x.shape[2:]) for x in result)
    return (out, lse) if return_lse else out


def ragged_paged_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    page_table: PageTable,
    q_indptr: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.ragged_paged_attention`: every query token is a row of its own.

    Differentiable as `paged_attention`, whose other `options` it takes.
    """
    q = jnp.asarray(q)
    page_size = _page_size(q, k_pages, kv_layout)
    table, owned, tokens = _rows_of_tokens(page_table, q_indptr, q.shape[0], page_size)
    if kv_starts is not None and page_table.kv_lens.shape != (0,):
        kv_starts = jnp.asarray(kv_starts, jnp.int32)[tokens.row]
    kv_starts = jnp.broadcast_to(jnp.asarray(0 if kv_starts is None else kv_starts, jnp.int32), owned.shape)
    if mask is not None:
        mask = jnp.asarray(mask)[:, None]
    out, lse = _attention(
        q[:, None],
        k_pages,
        v_pages,
        table,
        tokens.position[:, None],
        mask,
        kv_starts,
        kv_layout=kv_layout,
        **options,
    )
    lse = jnp.where(owned[:, None], lse[:, 0], -jnp.inf)  # no row, no sink
    return (out[:, 0], lse) if return_lse else out[:, 0]


def cascade_attention(
    q: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    levels: Sequence[tuple[PageTable, ArrayLike]],
    *,
    window_left: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = True,
    kv_layout: str = "HND",
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.cascade_attention`: every query token a row at every level, states merged.

    Differentiable as `paged_attention`, whose other `options` it takes.
    """
    q = jnp.asarray(q)
    page_size = _page_size(q, k_pages, kv_layout)
    rows = [_rows_of_tokens(*level, q.shape[0], page_size) for level in levels]
    *_, (_, owned, last) = rows
    before = list(
        itertools.accumulate([table.kv_lens for table, *_ in rows], initial=jnp.zeros_like(last.row))
    )
    position = before[len(rows) - 1] + last.position  # in the whole sequence
    zeros, states = jnp.zeros_like(last.row), []
    for level, (table, *_) in enumerate(rows):
        only_last: dict[str, Any] = {"causal": False}
        if level == len(rows) - 1:
            only_last = {"causal": causal, "window_left": window_left}
        of_level = None if mask is None or level < len(rows) - 1 else jnp.asarray(mask)[:, None]
        queries = (position - before[level])[:, None]
        arguments = q[:, None], k_pages, v_pages, table, queries, of_level, zeros
        states.append(_attention(*arguments, kv_layout=kv_layout, **only_last, **options))
    if sinks is not None:
        out, lse = states[-1]
        states.append((jnp.zeros_like(out), jnp.broadcast_to(jnp.asarray(sinks, jnp.float32), lse.shape)))
    out, lse = (x[:, 0] for x in merge_states(*(jnp.stack(x) for x in zip(*states, strict=True))))
    out, lse = jnp.where(owned[:, None, None], out, 0.0), jnp.where(owned[:, None], lse, -jnp.inf)
    return (out, lse) if return_lse else out


def _page_size(q: jax.Array, k_pages: ArrayLike, kv_layout: str) -> int:
    sizes = dict(zip(validation.LAYOUT_AXES[kv_layout], jnp.shape(k_pages), strict=True))
    expected = f"head_dim {sizes['head_dim']}, as k"
    validation.check(q.shape[-1:] == (sizes["head_dim"],), "q", expected, f"shape {q.shape}")
    return sizes["page_size"]


class _Tokens(NamedTuple):
    """The row of each query token, and its position among that row's keys."""

    row: jax.Array
    position: jax.Array


def _rows_of_tokens(
    page_table: PageTable, q_indptr: ArrayLike, total_q: int, page_size: int
) -> tuple[PageTable, jax.Array, _Tokens]:
    """Each token's own row of the table, whether it has one (else it has no key), and which one it is."""
    q_indptr, tokens = jnp.asarray(q_indptr, jnp.int32), jnp.arange(total_q, dtype=jnp.int32)
    row_starts, kv_lens = page_table.clipped(page_size)
    if kv_lens.shape[0] == 0:
        none = jnp.zeros(total_q, jnp.int32)
        return PageTable(page_table.indices, none, none, none), none > 0, _Tokens(none, none)
    # The first row that ends past the token.
    row = jnp.searchsorted(q_indptr[1:], tokens, side="right").astype(jnp.int32)
    owned = (row < kv_lens.shape[0]) & (tokens >= q_indptr[0])
    row = jnp.clip(row, 0, kv_lens.shape[0] - 1)
    lens = jnp.where(owned, kv_lens[row], 0)
    table = PageTable(page_table.indices, row_starts[row], page_table.row_pages[row], lens)
    return table, owned, _Tokens(row, lens - q_indptr[row + 1] + tokens)


def _attention(
    q: jax.Array,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    table: PageTable,
    queries: jax.Array,
    mask: jax.Array | None,
    kv_starts: jax.Array,
    *,
    sm_scale: ArrayLike | None = None,
    soft_cap: ArrayLike | None = None,
    window_left: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    causal: bool = True,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    kv_layout: str = "HND",
) -> tuple[jax.Array, jax.Array]:
    """Attend with q [rows, q_len, num_q_heads, head_dim] at the positions `queries` [rows, q_len] of rows."""
    # To [num_pages, page_size, num_kv_heads, head_dim].
    order = {"HND": (0, 2, 1, 3), "NHD": (0, 1, 2, 3), "HPND": (1, 2, 0, 3)}[kv_layout]
    k_pages, v_pages = (jnp.asarray(x).transpose(order) for x in (k_pages, v_pages))
    k_scale, v_scale = (_scales(x, k_pages.shape[:-1], order[:-1]) for x in (k_scale, v_scale))
    num_pages, page_size, num_kv_heads, head_dim = k_pages.shape
    q_len, num_q_heads = q.shape[1:3]
    sm_scale = jnp.asarray(head_dim**-0.5 if sm_scale is None else sm_scale, jnp.float32)
    soft_cap = jnp.asarray(0.0 if soft_cap is None else soft_cap, jnp.float32)
    slopes, sinks = (
        jnp.broadcast_to(jnp.asarray(absent if x is None else x, jnp.float32), num_q_heads)
        for x, absent in ((alibi_slopes, 0.0), (sinks, -jnp.inf))
    )
    indices, (row_starts, kv_lens) = table.indices, table.clipped(page_size)
    positions = jnp.arange(indices.shape[0] * page_size, dtype=jnp.int32)

    def attend(row):
        q, row_start, kv_len, kv_start, queries, mask = row
        entries = jnp.clip(row_start + positions // page_size, 0, indices.shape[0] - 1)
        pages, slots = jnp.clip(indices[entries], 0, num_pages - 1), positions % page_size
        visible = (positions >= kv_start) & (positions < kv_len)
        visible &= _visible(positions, queries, kv_len, causal, window_left, mask)
        k, v = (x[pages, slots].astype(jnp.float32) for x in (k_pages, v_pages))
        # What no query sees is replaced before use: NaN in it would reach outputs or gradients.
        seen = visible.any(axis=0)[:, None, None]
        k = jnp.where(seen, k * k_scale[pages, slots, :, None], 0.0)
        v = jnp.where(seen, v * v_scale[pages, slots, :, None], 0.0)
        q = q.astype(jnp.float32).reshape(q_len, num_kv_heads, -1, head_dim)
        scores = sm_scale * jnp.einsum("nhgd,thd->nhgt", q, k, precision="highest")
        scores = _capped(scores.reshape(q_len, num_q_heads, -1), soft_cap)
        distance = (positions - queries[:, None]).astype(jnp.float32)
        scores = scores + slopes[:, None] * distance[:, None]
        return _weighted(jnp.where(visible[:, None], scores, -jnp.inf), v, sinks)

    if num_pages == 0 or positions.size == 0:
        return jnp.zeros((*q.shape[:-1], v_pages.shape[-1])), jnp.broadcast_to(sinks, q.shape[:-1])
    return jax.lax.map(attend, (q, row_starts, kv_lens, kv_starts, queries, mask))


def _scales(scale: ArrayLike | None, shape: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """Scales of every token and head, [num_pages, page_size, num_kv_heads]."""
    scale = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
    return scale.transpose(order) if scale.ndim == 3 else jnp.broadcast_to(scale, shape)


def _visible(
    positions: jax.Array,
    queries: jax.Array,
    kv_len: jax.Array,
    causal: bool,
    window_left: ArrayLike | None,
    mask: jax.Array | None,
) -> jax.Array:
    """Which of the keys at `positions` the `queries`, given by their own positions, see: [q_len, keys]."""
    distance = positions - queries[:, None]
    visible = (distance <= 0) if causal else jnp.ones_like(distance, bool)
    if window_left is not None:
        window_left = jnp.asarray(window_left, jnp.int32)
        visible &= (window_left < 0) | (-distance <= window_left)
    if mask is not None and mask.shape[-1]:
        column = positions - (kv_len - mask.shape[-1])
        visible = jnp.where(column >= 0, mask[:, jnp.clip(column, 0, mask.shape[-1] - 1)], visible)
    return visible


def _capped(scores: jax.Array, soft_cap: jax.Array) -> jax.Array:
    """Soft-capped scores; a cap of 0 is off."""
    cap = jnp.where(soft_cap == 0, 1.0, soft_cap)
    return jnp.where(soft_cap == 0, scores, cap * jnp.tanh(scores / cap))


def _weighted(scores: jax.Array, v: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax of scores [q_len, num_q_heads, keys] and sinks [num_q_heads], as weights of v [keys, .., d]."""
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1), sinks))[..., None]
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks[:, None] - peak)
    empty, total = total == 0.0, jnp.where(total == 0.0, 1.0, total)
    grouped = (weights / total).reshape(weights.shape[0], v.shape[1], -1, v.shape[0])
    out = jnp.einsum("nhgt,thd->nhgd", grouped, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return out.reshape(*weights.shape[:2], -1), lse[..., 0]


def decode_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    kv_lens: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.decode_attention`, by `paged_attention`, which other `options` go to."""
    q, k_cache, v_cache = (jnp.asarray(x) for x in (q, k_cache, v_cache))
    rows = q.shape[:1] if q.ndim > 2 else ()
    scales = [None if x is None else jnp.asarray(x) for x in (k_scale, v_scale)]
    if not rows:
        k_cache, v_cache = k_cache[None], v_cache[None]
        scales = [x if x is None or x.ndim != 2 else x[None] for x in scales]
    pages = jnp.arange(k_cache.shape[0], dtype=jnp.int32)
    kv_lens = jnp.broadcast_to(jnp.asarray(kv_lens, jnp.int32), rows)
    page_table = PageTable(pages, pages.reshape(rows), jnp.ones(rows, jnp.int32), kv_lens)
    return paged_attention(q, k_cache, v_cache, page_table, k_scale=scales[0], v_scale=scales[1], **options)


def merge_state(
    out_a: ArrayLike, lse_a: ArrayLike, out_b: ArrayLike, lse_b: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.merge_state`; differentiable."""
    outs = jnp.stack([jnp.asarray(out_a), jnp.asarray(out_b)])
    return merge_states(outs, jnp.stack([jnp.asarray(lse_a), jnp.asarray(lse_b)]))


def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.merge_states`: a mean weighted by softmax(lses); differentiable."""
    outs, lses = jnp.asarray(outs, jnp.float32), jnp.asarray(lses, jnp.float32)
    empty = jnp.isinf(lses)
    # Where all are empty, finite stand-ins keep the softmax and its gradient free of NaN.
    all_empty = jnp.all(empty, axis=0)
    logits = jnp.where(all_empty, 0.0, jnp.where(empty, -jnp.inf, lses))
    weights = jnp.where(empty, 0.0, jax.nn.softmax(logits, axis=0))
    out = jnp.sum(weights[..., None] * jnp.where(empty[..., None], 0.0, outs), axis=0)
    return out, jnp.where(all_empty, -jnp.inf, jax.nn.logsumexp(logits, axis=0))


def append_paged_kv(
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_pages: ArrayLike | None = None,
    v_scale_pages: ArrayLike | None = None,
    kv_layout: str = "HND",
) -> tuple[jax.Array, ...]:
    """One token after the other; pools keep their dtype. Differentiable unless the pools are quantized."""
    slots, pools, news = jnp.asarray(slot_mapping), [], []
    for pages, new, scale in ((k_pages, k_new, k_scale), (v_pages, v_new, v_scale)):
        pools.append(jnp.asarray(pages))
        news.append(_stored(jnp.asarray(new), scale, pools[-1].dtype))
    for pages, scale in ((k_scale_pages, k_scale), (v_scale_pages, v_scale)):
        if pages is not None:
            pools.append(jnp.asarray(pages))
            news.append(jnp.asarray(scale, jnp.float32))
    axes = validation.LAYOUT_AXES[kv_layout]
    num_pages, page_size = (pools[0].shape[axes.index(axis)] for axis in ("num_pages", "page_size"))
    num_slots = min(num_pages * page_size, 2**31 - 1)

    def write(i, pools):
        page, offset = jnp.divmod(jnp.clip(slots[i], 0, num_slots - 1), page_size)
        valid = (slots[i] >= 0) & (slots[i] < num_slots)
        place = {"num_pages": page, "page_size": offset}
        at = tuple(place.get(axis, slice(None)) for axis in axes[:3])
        return [p.at[at].set(jnp.where(valid, new[i], p[at])) for p, new in zip(pools, news, strict=True)]

    if num_slots == 0:
        return tuple(pools)
    return tuple(jax.lax.fori_loop(0, slots.shape[0], write, pools))


def _stored(new: jax.Array, scale: ArrayLike | None, dtype: jnp.dtype) -> jax.Array:
    """What a pool of `dtype` keeps of new [num_tokens, num_kv_heads, head_dim]."""
    if dtype.itemsize > 1:
        return new.astype(dtype)
    scale = jnp.asarray(1.0 if scale is None else scale, jnp.float32)
    inverse = jnp.minimum(1 / scale, jnp.finfo(jnp.float32).max)  # 0 * inf would be NaN
    value = new.astype(jnp.float32) * (inverse[..., None] if scale.ndim else inverse)
    if dtype == jnp.int8:
        return jnp.nan_to_num(jnp.clip(jnp.round(value), -128, 127)).astype(dtype)
    largest = jnp.float32(jnp.finfo(dtype).max)
    return jnp.clip(value, -largest, largest).astype(dtype)


def append_kv(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    kv_lens: ArrayLike,
    *,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    k_scale_cache: ArrayLike | None = None,
    v_scale_cache: ArrayLike | None = None,
    kv_layout: str = "HND",
) -> tuple[jax.Array, ...]:
    """Row by row, by `append_paged_kv` into a pool of one page; caches keep their dtype."""
    caches = [None if x is None else jnp.asarray(x) for x in (k_cache, v_cache, k_scale_cache, v_scale_cache)]
    news = [jnp.asarray(k_new), jnp.asarray(v_new)]
    batched = news[0].ndim == 4
    lens = jnp.broadcast_to(jnp.asarray(kv_lens, jnp.int32), news[0].shape[:1] if batched else ())

    def row(caches, news, kv_len, scales):
        max_kv_len = caches[0].shape[{"HND": 1, "NHD": 0}[kv_layout]]
        slots = kv_len + jnp.arange(news[0].shape[0], dtype=jnp.int32)
        slots = jnp.where((kv_len >= 0) & (slots < max_kv_len), slots, -1)
        k, v, *scale_pages = jax.tree.map(lambda x: x[None], caches)
        names = ("k_scale", "v_scale", "k_scale_pages", "v_scale_pages")
        options: dict[str, Any] = dict(zip(names, (*scales, *scale_pages), strict=True))
        return [x[0] for x in append_paged_kv(k, v, news[0], news[1], slots, kv_layout=kv_layout, **options)]

    scales = [None if x is None else jnp.asarray(x) for x in (k_scale, v_scale)]
    if not batched:
        return tuple(row(caches, news, lens, scales))
    each = [0 if x is not None and x.ndim == 3 else None for x in scales]
    return tuple(jax.vmap(row, in_axes=(0, 0, 0, each))(caches, news, lens, scales))


def slot_mapping(
    page_table: PageTable, batch_indices: ArrayLike, positions: ArrayLike, *, page_size: int
) -> jax.Array:
    """One token after the other; int32."""
    table = page_table if page_table.kv_lens.ndim else page_table.as_batched()
    row_starts, kv_lens = table.clipped(page_size)
    batch, num_entries = kv_lens.shape[0], table.indices.shape[0]

    def slot(token):
        row, position = token
        in_row = (row >= 0) & (row < batch)
        row = jnp.clip(row, 0, batch - 1)
        in_row &= (position >= 0) & (position < kv_lens[row])
        page = table.indices[jnp.clip(row_starts[row] + position // page_size, 0, num_entries - 1)]
        fits = (page >= 0) & (page < (2**31 - 1) // page_size)
        return jnp.where(in_row & fits, page * page_size + position % page_size, -1)

    if batch == 0 or num_entries == 0:
        return jnp.full(jnp.shape(positions), -1, jnp.int32)
    return jax.lax.map(slot, (jnp.asarray(batch_indices, jnp.int32), jnp.asarray(positions, jnp.int32)))


def apply_rope(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    inv_freq: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> jax.Array:
    """Float32 `jax_paged_attn.apply_rope`: a product of complex numbers; differentiable."""
    x, positions = jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32)
    if cos_sin is not None:
        cos_sin = jnp.asarray(cos_sin, jnp.float32)
        inside = (positions >= 0) & (positions < cos_sin.shape[0])
        cos, sin = jnp.split(
            jnp.where(inside[:, None], cos_sin[positions % cos_sin.shape[0]], jnp.nan), 2, axis=1
        )
    else:
        angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)[None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
    half = cos.shape[1]
    pairs = jnp.arange(half)
    first, second = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + half)
    rotated = jax.lax.complex(x[..., first], x[..., second]) * jax.lax.complex(cos, sin)[:, None]
    return x.at[..., first].set(rotated.real).at[..., second].set(rotated.imag)


def rope_append_paged_kv(
    q: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    positions: ArrayLike,
    k_pages: ArrayLike,
    v_pages: ArrayLike,
    slot_mapping: ArrayLike,
    *,
    inv_freq: ArrayLike | None = None,
    cos_sin: ArrayLike | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """`apply_rope` of q and k, then `append_paged_kv`, which `options` go to; q in float32."""
    rotation = {"inv_freq": inv_freq, "cos_sin": cos_sin, "interleaved": interleaved}
    q, k_new = (apply_rope(x, positions, **rotation) for x in (q, k_new))
    return q, *append_paged_kv(k_pages, v_pages, k_new, v_new, slot_mapping, **options)
