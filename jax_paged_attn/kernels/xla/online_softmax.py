"""An online softmax over tiles of keys, all rows in step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_paged_attn import merge
from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.calls.modifiers import Modifiers
from jax_paged_attn.dispatch import varying_axes


class Rows(NamedTuple):
    """Query tokens over the keys of a row: of whole rows, or of parts of them.

    Attributes
    ----------
    q : [rows, q_len, num_q_heads, head_dim]
    positions : int32[rows, q_len]
        Of the queries, among the keys of their row.
    is_query : bool[rows, q_len] or None
        Which of them are none; None says that all are.
    starts, kv_lens : int32[rows]
        Where each row's entries begin, and its keys, clipped.
    first_key, end_key : int32[rows] or None
        Between which keys the row's queries see any; None leaves it to `kv_lens`.
    """

    q: jax.Array
    positions: jax.Array
    is_query: jax.Array | None
    starts: jax.Array
    kv_lens: jax.Array
    first_key: jax.Array | None
    end_key: jax.Array | None


def attend(
    problem: Problem,
    rows: Rows,
    operands: Operands,
    modifiers: Modifiers,
    *,
    causal: bool,
    num_splits: int,
    block_kv: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend with `rows` to the pages of `operands`.

    Modifiers that belong to rows are those of `rows`. Without `causal`, queries may see keys after them.

    Returns
    -------
    out : float32[rows, q_len, num_q_heads, v_head_dim]
    lse : float32[rows, q_len, num_q_heads]
    """
    _, k_pages, v_pages, page_table, sm_scale, k_scale, v_scale, _ = operands
    num_kv_heads, group_size, kv_lens = problem.num_kv_heads, problem.group_size, rows.kv_lens
    num_rows, q_len = rows.q.shape[:2]
    # Einsum letters: b row, s split, h kv head, n query token, g query head of the group, t key, d and e
    # head_dim.
    tile_axes = "hbst" if problem.kv_layout == "HPND" else "bsth"
    precision = jax.lax.Precision.HIGHEST if problem.dtype == jnp.float32 else None

    tiles = -(-kv_lens // block_kv)
    run = -(-tiles // num_splits)  # tiles of each split of a row
    first_tile = run[:, None] * jnp.arange(num_splits, dtype=jnp.int32)[None]  # [rows, num_splits]
    end_tile = jnp.minimum(first_tile + run[:, None], tiles[:, None])
    # Tiles that no query sees are not read; the cuts stay where they are.
    if rows.first_key is not None:
        first_tile = jnp.maximum(first_tile, jnp.maximum(rows.first_key, 0)[:, None] // block_kv)
    if rows.end_key is not None:
        end_tile = jnp.minimum(end_tile, -(-jnp.maximum(rows.end_key, 0)[:, None] // block_kv))
    q = rows.q.reshape(num_rows, q_len, num_kv_heads, group_size, problem.head_dim)
    of_heads = {
        name: getattr(modifiers, name).reshape(num_kv_heads, 1, group_size)
        for name in {"alibi_slopes", "sinks"} & {*problem.given}
    }

    def multiply(equation, a, b):
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def tile_scale(scale, kind, index):
        """Scales of a tile, to multiply [row, split, kv head, token, group, key] by."""
        if kind == "head":
            return scale[None, None, :, None, None, None]
        tile = scale.at[index].get(mode="promise_in_bounds")
        to_heads = {"bsth": (0, 1, 3, 2), "hbst": (1, 2, 0, 3)}[tile_axes]
        return tile.transpose(to_heads)[:, :, :, None, None, :]

    def add_tile(step, state):
        peak, total, acc = state
        tile = (first_tile + step)[..., None]
        positions = tile * block_kv + jnp.arange(block_kv, dtype=jnp.int32)[None, None]
        # Tiles are compared as well, because positions past the longest row's end could wrap around.
        valid = (tile < end_tile[..., None]) & (positions < kv_lens[:, None, None])
        if modifiers.kv_starts is not None:
            valid &= positions >= modifiers.kv_starts[:, None, None]
        distance = positions[:, :, None] - rows.positions[:, None, :, None]
        visible = valid[:, :, None] & _visible(causal, modifiers, positions, distance, kv_lens)
        if rows.is_query is not None:
            visible &= rows.is_query[:, None, :, None]
        index = _tile_index(problem, page_table.indices, rows.starts, positions)
        # Every value of a quantized cache is one of the query's dtype too.
        k, v = (pages.at[index].get(mode="promise_in_bounds").astype(q.dtype) for pages in (k_pages, v_pages))
        scores = sm_scale * multiply(f"bnhgd,{tile_axes}d->bshngt", q, k)
        if k_scale is not None:
            scores = scores * tile_scale(k_scale, problem.k_scale, index)
        if modifiers.soft_cap is not None:
            scores = _capped(scores, modifiers.soft_cap)
        if "alibi_slopes" in of_heads:
            slopes = of_heads["alibi_slopes"][None, None, ..., None]
            scores = scores + slopes * distance.astype(jnp.float32)[:, :, None, :, None]
        scores = jnp.where(visible[:, :, None, :, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # Until a run meets a visible key its peak is -inf, and subtracting that would make NaN.
        shift = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(peak - shift)
        # Masked by selection: a weight of zero doesn't silence NaN in an unused slot.
        seen = jnp.any(visible, axis=2)
        mask = seen[None] if tile_axes == "hbst" else seen[..., None]
        v = jnp.where(mask[..., None], v, jnp.zeros((), v.dtype))
        if problem.v_scale == "token":
            # Relative to the largest, so that small products don't fall below what 16 bits hold.
            scale = tile_scale(v_scale, "token", index)
            scale = jnp.where(seen[:, :, None, None, None, :], scale, 0.0)
            weighted = weights * scale
            largest = jnp.max(jnp.abs(weighted), axis=-1, keepdims=True)
            largest = jnp.where(largest == 0.0, 1.0, largest)
            weighted = (weighted / largest).astype(v.dtype)
            partial = multiply(f"bshngt,{tile_axes}e->bshnge", weighted, v) * largest
        else:
            partial = multiply(f"bshngt,{tile_axes}e->bshnge", weights.astype(v.dtype), v)
        return new_peak, total * decay + jnp.sum(weights, axis=-1), acc * decay[..., None] + partial

    runs = (num_rows, num_splits, num_kv_heads, q_len, group_size)
    state = (
        jnp.full(runs, -jnp.inf, jnp.float32),
        jnp.zeros(runs, jnp.float32),
        jnp.zeros((*runs, problem.v_head_dim), jnp.float32),
    )
    axes = varying_axes((rows, operands))  # a loop's state must vary as its operands do, from the start
    state = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), state)
    steps = jnp.max(end_tile - first_tile, initial=0)
    peak, total, acc = jax.lax.fori_loop(0, steps, add_tile, state)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    if v_scale is not None and problem.v_scale == "head":
        # Selected: a row without keys gives 0 whatever the scale is.
        scaled = out * v_scale[None, None, :, None, None, None]
        out = jnp.where((total == 0.0)[..., None], 0.0, scaled)
    lse = peak + jnp.log(total)
    out, lse = jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0)
    out, lse = merge.merge_states(out, lse) if num_splits > 1 else (out[0], lse[0])
    if "sinks" in of_heads:  # a sink is a state of its own, whose output is 0
        sinks = jnp.broadcast_to(of_heads["sinks"], lse.shape)
        out, lse = merge.merge_state(out, lse, jnp.zeros_like(out), sinks)
    shape = (num_rows, q_len, problem.num_q_heads)
    out, lse = jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1)
    return out.reshape(*shape, problem.v_head_dim), lse.reshape(shape)


def _visible(
    causal: bool, modifiers: Modifiers, positions: jax.Array, distance: jax.Array, kv_lens: jax.Array
) -> jax.Array:
    """Which of a row's keys each query sees, but for the row's ends; broadcasts to `distance`."""
    visible = distance <= 0 if causal else jnp.ones((1, 1, 1, 1), bool)
    if modifiers.window_left is not None:
        visible = visible & ((modifiers.window_left < 0) | (-distance <= modifiers.window_left))
    if modifiers.mask is not None:
        mask_len = modifiers.mask.shape[-1]
        column = (positions - kv_lens[:, None, None] + mask_len)[:, :, None]
        at = jnp.clip(column, 0, mask_len - 1)
        decided = jnp.take_along_axis(modifiers.mask[:, None], at, axis=-1, mode="promise_in_bounds")
        visible = jnp.where(column >= 0, decided, visible)
    return visible


def _capped(scores: jax.Array, soft_cap: jax.Array) -> jax.Array:
    """Soft-capped scores; a cap of 0 is off."""
    cap = jnp.where(soft_cap == 0, 1.0, soft_cap)
    return jnp.where(soft_cap == 0, scores, cap * jnp.tanh(scores / cap))


def _tile_index(
    problem: Problem, indices: jax.Array, row_starts: jax.Array, positions: jax.Array
) -> tuple[Any, ...]:
    """Index a pool at positions [rows, num_splits, block_kv] of each row.

    That gathers [rows, num_splits, block_kv, num_kv_heads, ..], or with the heads first for "HPND": the
    order in which a gather yields them, without moving the pool.
    """
    entries = row_starts[:, None, None] + positions // problem.page_size
    entries = jnp.clip(entries, 0, problem.num_entries - 1)
    pages = indices.at[entries].get(mode="promise_in_bounds")
    pages = jnp.clip(pages, 0, problem.num_pages - 1)
    slots = positions % problem.page_size
    return {
        "HND": (pages, slice(None), slots),
        "NHD": (pages, slots),
        "HPND": (slice(None), pages, slots),
    }[problem.kv_layout]
