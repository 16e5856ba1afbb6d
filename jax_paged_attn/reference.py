"""Float32 oracles in plain jnp: slow, obvious, differentiable.

Each function takes the arguments of the public function of its name, computes in float32 at the highest
precision of matrix products whatever the dtype of its inputs, and returns float32. A row is gathered whole.
"""

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
    sm_scale: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.paged_attention`; differentiable in q, k_pages, v_pages and sm_scale."""
    # To [num_pages, page_size, num_kv_heads, head_dim].
    order = {"HND": (0, 2, 1, 3), "NHD": (0, 1, 2, 3), "HPND": (1, 2, 0, 3)}[kv_layout]
    k_pages, v_pages = (jnp.asarray(x).transpose(order) for x in (k_pages, v_pages))
    q, (num_pages, page_size, _, head_dim) = jnp.asarray(q), k_pages.shape
    validation.check(q.shape[-1:] == (head_dim,), "q", f"head_dim {head_dim}, as k", f"shape {q.shape}")
    sm_scale = jnp.asarray(head_dim**-0.5 if sm_scale is None else sm_scale, jnp.float32)
    indices, (row_starts, kv_lens) = page_table.indices, page_table.clipped(page_size)
    kv_starts = jnp.zeros_like(kv_lens) if kv_starts is None else jnp.asarray(kv_starts, jnp.int32)
    positions = jnp.arange(indices.shape[0] * page_size, dtype=jnp.int32)

    def attend(row):
        q, row_start, kv_len, kv_start = row
        entries = jnp.clip(row_start + positions // page_size, 0, indices.shape[0] - 1)
        pages, slots = jnp.clip(indices[entries], 0, num_pages - 1), positions % page_size
        valid = (positions >= kv_start) & (positions < kv_len)
        return _attend_row(q, k_pages[pages, slots], v_pages[pages, slots], valid, sm_scale)

    if num_pages == 0 or positions.size == 0:
        out = jnp.zeros((*q.shape[:-1], v_pages.shape[-1])), jnp.full(q.shape[:-1], -jnp.inf)
    else:
        rows = (q, row_starts, kv_lens, kv_starts)
        out = attend(rows) if q.ndim == 2 else jax.lax.map(attend, rows)
    return out if return_lse else out[0]


def _attend_row(
    q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array, sm_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attend by q [num_q_heads, head_dim] to k, v [kv_len, num_kv_heads, head_dim] where valid [kv_len]."""
    # Masked keys and values are replaced before use: NaN in them would reach outputs or gradients.
    k, v = (jnp.where(valid[:, None, None], x.astype(jnp.float32), 0.0) for x in (k, v))
    q = q.astype(jnp.float32).reshape(k.shape[1], -1, k.shape[2])
    scores = sm_scale * jnp.einsum("hgd,thd->hgt", q, k, precision="highest")
    scores = jnp.where(valid, scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    empty, total = total == 0.0, jnp.where(total == 0.0, 1.0, total)
    out = jnp.einsum("hgt,thd->hgd", weights / total, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, peak + jnp.log(total))
    return out.reshape(-1, out.shape[-1]), lse.reshape(-1)


def decode_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    kv_lens: ArrayLike,
    *,
    sm_scale: ArrayLike | None = None,
    kv_starts: ArrayLike | None = None,
    kv_layout: str = "HND",
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Float32 `jax_paged_attn.decode_attention`; differentiable in q, k_cache, v_cache and sm_scale."""
    q, k_cache, v_cache = (jnp.asarray(x) for x in (q, k_cache, v_cache))
    rows = q.shape[:-2]
    if not rows:
        k_cache, v_cache = k_cache[None], v_cache[None]
    pages = jnp.arange(k_cache.shape[0], dtype=jnp.int32)
    kv_lens = jnp.broadcast_to(jnp.asarray(kv_lens, jnp.int32), rows)
    page_table = PageTable(pages, pages.reshape(rows), jnp.ones(rows, jnp.int32), kv_lens)
    options = {"sm_scale": sm_scale, "kv_starts": kv_starts, "kv_layout": kv_layout, "return_lse": return_lse}
    return paged_attention(q, k_cache, v_cache, page_table, **options)


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
