"""Attention by an online softmax over tiles of keys, all rows in step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged_attn import merge, validation
from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.calls.modifiers import Modifiers, first_visible
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

_MAX_BLOCK_KV = 2**20  # a tile of it is far past any use, and positions stay in int32


@dataclasses.dataclass(frozen=True)
class Config:
    """Choices of the XLA implementation.

    Attributes
    ----------
    block_kv : int
        Keys of each row that are gathered and multiplied at a time, whatever the page size; at most 2**20.
    """

    block_kv: int = 128

    def __post_init__(self):
        validation.check_positive_int("block_kv", self.block_kv, _MAX_BLOCK_KV)


def why_not(problem: Problem, target: Target) -> str | None:
    """None: it runs every problem everywhere."""
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """One tile size for all: a row's bits must not depend on capacities."""
    return Config()


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of a step's tiles and running state."""
    runs = problem.batch * _num_splits(problem, config)
    tile = problem.num_kv_heads * config.block_kv * (problem.head_dim + problem.v_head_dim)
    state = problem.q_len * problem.num_q_heads * (problem.v_head_dim + 2 + config.block_kv)
    return Usage(smem_bytes=0, workspace_bytes=runs * (tile * problem.dtype.itemsize + 4 * state))


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend; see `jax_paged_attn.kernels` for the contract."""
    q, k_pages, v_pages, page_table, sm_scale, k_scale, v_scale, modifiers = operands
    batch, num_kv_heads, group_size = problem.batch, problem.num_kv_heads, problem.group_size
    num_splits, block_kv = _num_splits(problem, config), config.block_kv
    # Einsum letters: b row, s split, h kv head, n query token, g query head of the group, t key, d and e
    # head_dim.
    tile_axes = "hbst" if problem.kv_layout == "HPND" else "bsth"
    precision = jax.lax.Precision.HIGHEST if problem.dtype == jnp.float32 else None

    row_starts, kv_lens = page_table.clipped(problem.page_size)
    tiles = -(-kv_lens // block_kv)
    run = -(-tiles // num_splits)  # tiles of each split of a row
    first_tile = run[:, None] * jnp.arange(num_splits, dtype=jnp.int32)[None]  # [batch, num_splits]
    end_tile = jnp.minimum(first_tile + run[:, None], tiles[:, None])
    of_window = modifiers.kv_starts, modifiers.window_left
    first_key = first_visible(problem.q_len, problem.mask_len, kv_lens, *of_window)
    if first_key is not None:  # tiles before it are not read; the cuts stay where they are
        first_tile = jnp.maximum(first_tile, jnp.maximum(first_key, 0)[:, None] // block_kv)
    q = q.reshape(batch, problem.q_len, num_kv_heads, group_size, problem.head_dim)
    of_heads = {
        name: getattr(modifiers, name).reshape(num_kv_heads, 1, group_size)
        for name in {"alibi_slopes", "sinks"} & {*problem.given}
    }

    def multiply(equation, a, b):
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def tile_scale(scale, kind, index):
        """Scales of a tile, to multiply [batch, split, kv head, token, group, key] by."""
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
        distance = _distance(problem, positions, kv_lens)
        visible = valid[:, :, None] & _visible(problem, modifiers, positions, distance, kv_lens)
        index = _tile_index(problem, page_table.indices, row_starts, positions)
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

    runs = (batch, num_splits, num_kv_heads, problem.q_len, group_size)
    state = (
        jnp.full(runs, -jnp.inf, jnp.float32),
        jnp.zeros(runs, jnp.float32),
        jnp.zeros((*runs, problem.v_head_dim), jnp.float32),
    )
    axes = varying_axes(operands)  # a loop's state must vary as its operands do, from the start
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
    rows = (batch, problem.q_len, problem.num_q_heads)
    out, lse = jnp.moveaxis(out, 2, 1), jnp.moveaxis(lse, 2, 1)
    out = out.reshape(*rows, problem.v_head_dim).astype(problem.dtype)
    return out, lse.reshape(rows) if problem.return_lse else None


def _distance(problem: Problem, positions: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """How far after each query keys at positions [batch, num_splits, block_kv] lie: [.., q_len, block_kv]."""
    queries = kv_lens[:, None] + (jnp.arange(problem.q_len, dtype=jnp.int32) - problem.q_len)[None]
    return positions[:, :, None] - queries[:, None, :, None]


def _visible(
    problem: Problem, modifiers: Modifiers, positions: jax.Array, distance: jax.Array, kv_lens: jax.Array
) -> jax.Array:
    """Which of a row's keys each query sees, but for the row's ends; broadcasts to `distance`."""
    # The only query of a row sits at its last key.
    last_query = problem.q_len == 1 or not problem.causal
    visible = jnp.ones((1, 1, 1, 1), bool) if last_query else distance <= 0
    if modifiers.window_left is not None:
        visible = visible & ((modifiers.window_left < 0) | (-distance <= modifiers.window_left))
    if modifiers.mask is not None:
        column = (positions - kv_lens[:, None, None] + problem.mask_len)[:, :, None]
        at = jnp.clip(column, 0, problem.mask_len - 1)
        decided = jnp.take_along_axis(modifiers.mask[:, None], at, axis=-1, mode="promise_in_bounds")
        visible = jnp.where(column >= 0, decided, visible)
    return visible


def _capped(scores: jax.Array, soft_cap: jax.Array) -> jax.Array:
    """Soft-capped scores; a cap of 0 is off."""
    cap = jnp.where(soft_cap == 0, 1.0, soft_cap)
    return jnp.where(soft_cap == 0, scores, cap * jnp.tanh(scores / cap))


def _num_splits(problem: Problem, config: Config) -> int:
    """Runs of each row: no more than a row can have tiles, as the others would be empty."""
    num_splits = problem.num_splits or 1
    if problem.is_symbolic:
        return num_splits
    return max(1, min(num_splits, -(-problem.num_entries * problem.page_size // config.block_kv)))


def _tile_index(
    problem: Problem, indices: jax.Array, row_starts: jax.Array, positions: jax.Array
) -> tuple[Any, ...]:
    """Index a pool at positions [batch, num_splits, block_kv] of each row.

    That gathers [batch, num_splits, block_kv, num_kv_heads, ..], or with the heads first for "HPND": the
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
