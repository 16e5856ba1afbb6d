"""Decode attention by an online softmax over tiles of keys, all rows in step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_paged_attn import merge, validation
from jax_paged_attn.calls import mla
from jax_paged_attn.calls.attention import Operands, Problem
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

from .online_softmax import State

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
    runs = problem.batch * count_splits(problem, config)
    tile = problem.num_kv_heads * config.block_kv * (problem.head_dim + problem.v_head_dim)
    state = problem.num_q_heads * (problem.v_head_dim + 2 + config.block_kv)
    return Usage(smem_bytes=0, workspace_bytes=runs * (tile * problem.dtype.itemsize + 4 * state))


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend; see `jax_paged_attn.kernels` for the contract."""
    q, k_pages, v_pages, page_table, kv_starts, sm_scale, k_scale, v_scale = operands
    batch, num_kv_heads, group_size = problem.batch, problem.num_kv_heads, problem.group_size
    num_splits, block_kv = count_splits(problem, config), config.block_kv
    # Einsum letters: b row, s split, h kv head, g query head of the group, t key, d and e head_dim.
    tile_axes = "hbst" if problem.kv_layout == "HPND" else "bsth"
    precision = jax.lax.Precision.HIGHEST if problem.dtype == jnp.float32 else None

    row_starts, kv_lens = page_table.clipped(problem.page_size)
    tiles = -(-kv_lens // block_kv)
    run = -(-tiles // num_splits)  # tiles of each split of a row
    first_tile = run[:, None] * jnp.arange(num_splits, dtype=jnp.int32)[None]  # [batch, num_splits]
    end_tile = jnp.minimum(first_tile + run[:, None], tiles[:, None])
    q = q.reshape(batch, num_kv_heads, group_size, problem.head_dim)

    def multiply(equation, a, b):
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def tile_scale(scale, kind, index):
        """Scales of a tile, to multiply [batch, split, kv head, group, key] by."""
        if kind == "head":
            return scale[None, None, :, None, None]
        tile = scale.at[index].get(mode="promise_in_bounds")
        to_heads = {"bsth": (0, 1, 3, 2), "hbst": (1, 2, 0, 3)}[tile_axes]
        return tile.transpose(to_heads)[:, :, :, None, :]

    def add_tile(step, state):
        tile = (first_tile + step)[..., None]
        positions = tile * block_kv + jnp.arange(block_kv, dtype=jnp.int32)[None, None]
        # Tiles are compared as well, because positions past the longest row's end could wrap around.
        valid = (tile < end_tile[..., None]) & (positions < kv_lens[:, None, None])
        if kv_starts is not None:
            valid &= positions >= kv_starts[:, None, None]
        index = _tile_index(problem, page_table.indices, row_starts, positions)
        # Every value of a quantized cache is one of the query's dtype too.
        k, v = (pages.at[index].get(mode="promise_in_bounds").astype(q.dtype) for pages in (k_pages, v_pages))
        scores = sm_scale * multiply(f"bhgd,{tile_axes}d->bshgt", q, k)
        if k_scale is not None:
            scores = scores * tile_scale(k_scale, problem.k_scale, index)
        scores = jnp.where(valid[:, :, None, None, :], scores, -jnp.inf)
        state, weights = state.weigh(scores)
        # Masked by selection: a weight of zero doesn't silence NaN in an unused slot.
        mask = valid[None] if tile_axes == "hbst" else valid[..., None]
        v = jnp.where(mask[..., None], v, jnp.zeros((), v.dtype))
        if problem.v_scale == "token":
            # Relative to the largest, so that small products don't fall below what 16 bits hold.
            scale = jnp.where(valid[:, :, None, None, :], tile_scale(v_scale, "token", index), 0.0)
            weighted = weights * scale
            largest = jnp.max(jnp.abs(weighted), axis=-1, keepdims=True)
            largest = jnp.where(largest == 0.0, 1.0, largest)
            weighted = (weighted / largest).astype(v.dtype)
            partial = multiply(f"bshgt,{tile_axes}e->bshge", weighted, v) * largest
        else:
            partial = multiply(f"bshgt,{tile_axes}e->bshge", weights.astype(v.dtype), v)
        return state.add(partial)

    state = State.empty((batch, num_splits, num_kv_heads, group_size), problem.v_head_dim)
    axes = varying_axes(operands)  # a loop's state must vary as its operands do, from the start
    state = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), state)
    out, lse = jax.lax.fori_loop(0, jnp.max(run, initial=0), add_tile, state).result()
    if v_scale is not None and problem.v_scale == "head":
        # Selected: a row without keys gives 0 whatever the scale is.
        scaled = out * v_scale[None, None, :, None, None]
        out = jnp.where((lse == -jnp.inf)[..., None], 0.0, scaled)
    if num_splits > 1:
        out, lse = merge.merge_states(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0))
    out = out.reshape(batch, problem.num_q_heads, problem.v_head_dim).astype(problem.dtype)
    return out, lse.reshape(batch, problem.num_q_heads) if problem.return_lse else None


def count_splits(problem: Problem | mla.Problem, config: Config) -> int:
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
