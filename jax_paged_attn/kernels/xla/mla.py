"""Latent attention by an online softmax over tiles of latents, all rows in step."""

import jax
import jax.numpy as jnp

from jax_paged_attn import merge
from jax_paged_attn.calls.mla import SCALE_CHANNELS, Operands, Problem
from jax_paged_attn.dispatch import Target, varying_axes
from jax_paged_attn.kernels import Usage

from . import attention
from .attention import Config
from .softmax_state import State

__all__ = ["Config", "default_config", "run", "usage", "why_not"]


def why_not(problem: Problem, target: Target) -> str | None:
    """None: it runs every problem everywhere."""
    return None


def default_config(problem: Problem, target: Target) -> Config:
    """One tile size for all: a row's bits must not depend on capacities."""
    return Config()


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of a step's tiles and running state."""
    runs = problem.batch * attention.num_splits(problem, config.block_kv)
    tile = config.block_kv * (problem.rank + problem.rope_dim)
    state = problem.queries * (problem.rank + 2 + config.block_kv)
    return Usage(smem_bytes=0, workspace_bytes=runs * (tile * problem.dtype.itemsize + 4 * state))


def run(problem: Problem, config: Config, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Attend; see `jax_paged_attn.kernels` for the contract."""
    p, x = problem, operands
    num_splits, block_kv = attention.num_splits(p, config.block_kv), config.block_kv
    precision = jax.lax.Precision.HIGHEST if p.dtype == jnp.float32 else None
    # Channels fall into groups that share a scale: into one where scales don't belong to tokens.
    channels = SCALE_CHANNELS if p.kv_scale == "token" else p.rank
    groups = p.rank // channels
    # Einsum letters: b row, s split, q query, t latent, g group, c channel of a group, e column of the rope.
    q_nope = x.q_nope.reshape(p.batch, p.queries, groups, channels)
    q_pe = x.q_pe.reshape(p.batch, p.queries, p.rope_dim)
    latent_scale = rope_scale = jnp.float32(1)
    if x.kv_scale is not None and p.kv_scale == "tensor":
        latent_scale = x.kv_scale[0]
        rope_scale = latent_scale if p.rope_dtype == p.latent_dtype else rope_scale

    row_starts, kv_lens = x.page_table.clipped(p.page_size)
    tiles = -(-kv_lens // block_kv)
    run = -(-tiles // num_splits)  # tiles of each split of a row
    first_tile = run[:, None] * jnp.arange(num_splits, dtype=jnp.int32)[None]  # [batch, num_splits]
    end_tile = jnp.minimum(first_tile + run[:, None], tiles[:, None])
    ends = kv_lens[:, None]  # of what each query sees, [batch, queries]
    if p.causal:
        token = jnp.arange(p.queries, dtype=jnp.int32)[None] // p.num_heads
        ends = ends - (p.q_len - 1) + token

    def multiply(equation, a, b):
        return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)

    def gather(pages, index):
        return pages.at[index].get(mode="promise_in_bounds")

    def add_tile(step, state):
        tile = (first_tile + step)[..., None]
        positions = tile * block_kv + jnp.arange(block_kv, dtype=jnp.int32)[None, None]
        # Tiles are compared as well, because positions past the longest row's end could wrap around.
        valid = (tile < end_tile[..., None]) & (positions < kv_lens[:, None, None])
        entries = jnp.clip(row_starts[:, None, None] + positions // p.page_size, 0, p.num_entries - 1)
        page = jnp.clip(gather(x.page_table.indices, entries), 0, p.num_pages - 1)
        index = (page, positions % p.page_size)
        # Every value of a quantized cache is one of the query's dtype too. Masked by selection, as what lies
        # in unused slots may be NaN, and a weight of zero doesn't silence that.
        latents = jnp.where(valid[..., None], gather(x.latent_pages, index).astype(p.dtype), 0)
        if x.rope_pages is None:
            latents, ropes = jnp.split(latents, [p.rank], axis=-1)
        else:
            ropes = jnp.where(valid[..., None], gather(x.rope_pages, index).astype(p.dtype), 0)
        latents = latents.reshape(*latents.shape[:-1], groups, channels)
        if x.kv_scale is not None and p.kv_scale == "token":
            scales = jnp.where(valid[..., None], gather(x.kv_scale, index), 0.0)  # [b, s, t, g]
            scores = jnp.einsum(
                "bsqtg,bstg->bsqt",
                multiply("bqgc,bstgc->bsqtg", q_nope, latents),
                scales,
                precision="highest",
            )
        else:
            scales = None
            scores = multiply("bqgc,bstgc->bsqt", q_nope, latents) * latent_scale
        scores = (scores + multiply("bqe,bste->bsqt", q_pe, ropes) * rope_scale) * x.sm_scale
        seen = valid[:, :, None, :] & (positions[:, :, None, :] < ends[:, None, :, None])
        state, weights = state.weigh(jnp.where(seen, scores, -jnp.inf))
        if scales is None:
            partial = multiply("bsqt,bstgc->bsqgc", weights.astype(p.dtype), latents)
        else:
            # Relative to the largest, so that small products don't fall below what 16 bits hold.
            weighted = weights[..., None] * scales[:, :, None]  # [b, s, q, t, g]
            largest = jnp.max(jnp.abs(weighted), axis=3, keepdims=True)
            largest = jnp.where(largest == 0.0, 1.0, largest)
            partial = multiply("bsqtg,bstgc->bsqgc", (weighted / largest).astype(p.dtype), latents)
            partial = partial * largest[:, :, :, 0, :, None]
        return state.add(partial.reshape(*partial.shape[:3], p.rank))

    state = State.empty((p.batch, num_splits, p.queries), p.rank)
    axes = varying_axes(operands)  # a loop's state must vary as its operands do, from the start
    state = jax.tree.map(lambda x: jax.lax.pcast(x, axes, to="varying"), state)
    out, lse = jax.lax.fori_loop(0, jnp.max(run, initial=0), add_tile, state).result()
    # Selected: a query without keys gives 0 whatever the scale is.
    out = jnp.where(lse[..., None] == -jnp.inf, 0.0, out * latent_scale)
    if num_splits > 1:
        out, lse = merge.merge_states(jnp.moveaxis(out, 1, 0), jnp.moveaxis(lse, 1, 0))
    queries = (p.batch, p.q_len, p.num_heads)
    out = out.reshape(*queries, p.rank).astype(p.dtype)
    return out, lse.reshape(queries) if p.return_lse else None
