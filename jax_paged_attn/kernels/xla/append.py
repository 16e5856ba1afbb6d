"""Writing new tokens into a cache by scatters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_paged_attn import rope
from jax_paged_attn.calls.append import Operands, Problem, Results
from jax_paged_attn.dispatch import Target
from jax_paged_attn.kernels import Usage
from jax_paged_attn.quantize import stored


@dataclasses.dataclass(frozen=True)
class Config:
    """The XLA implementation has no choices to make."""


def why_not(problem: Problem, target: Target) -> str | None:
    """None: it runs every problem everywhere."""
    return None


def default_config(problem: Problem, target: Target) -> Config:
    return Config()


def usage(problem: Problem, config: Config) -> Usage:
    """Estimate the bytes of what is scattered, and of the sort that finds equal slots."""
    token = problem.head_dim * problem.k_dtype.itemsize + problem.v_head_dim * problem.v_dtype.itemsize
    return Usage(smem_bytes=0, workspace_bytes=problem.num_tokens * (problem.num_kv_heads * token + 16))


def run(problem: Problem, config: Config, operands: Operands) -> Results:
    """Rotate, quantize, and scatter; see `jax_paged_attn.kernels` for the contract."""
    x = operands
    k_new, v_new, q = x.k_new, x.v_new, None
    if x.rotation is not None and problem.rotation is not None:
        cos, sin = rope.cos_sin_at(x.rotation.positions, x.rotation.frequencies)
        interleaved = problem.rotation.interleaved
        q = rope.rotate(x.rotation.q, cos, sin, interleaved=interleaved)
        # Rounded once, to the pool's dtype.
        k_new = rope.rotate(k_new.astype(jnp.float32), cos, sin, interleaved=interleaved)
    k_new = stored(k_new, _by_token_and_head(x.k_scale), problem.k_dtype)
    v_new = stored(v_new, _by_token_and_head(x.v_scale), problem.v_dtype)
    # Skipped tokens get a page past the pool, which a scatter drops.
    page_size = problem.page_size
    kept = _last_of_equal(x.slots) & (x.slots >= 0) & (x.slots < problem.num_slots)
    pages = jnp.where(kept, x.slots // page_size, problem.num_pages) if page_size != 0 else x.slots
    offsets = x.slots % page_size if page_size != 0 else x.slots

    def write(pool: Any, new: Any) -> Any:
        if pool is None:
            return None
        if pool.dtype.name.startswith("float8"):
            # As bits: on the CPU XLA would convert the pool to float16 and back, and change which NaN it has.
            bits = (lax.bitcast_convert_type(x, jnp.uint8) for x in (pool, new))
            return lax.bitcast_convert_type(write(*bits), pool.dtype)
        if problem.kv_layout == "HPND":
            return pool.at[:, pages, offsets].set(jnp.moveaxis(new, 1, 0), mode="drop")
        index = (pages, slice(None), offsets) if problem.kv_layout == "HND" else (pages, offsets)
        return pool.at[index].set(new, mode="drop")

    if problem.joined:
        k_new = jnp.concatenate([k_new, v_new], axis=-1)
    return Results(
        write(x.k_pages, k_new),
        write(x.v_pages, v_new),
        write(x.k_scale_pages, x.k_scale),
        write(x.v_scale_pages, x.v_scale),
        q,
    )


def _by_token_and_head(scale: jax.Array | None) -> jax.Array | None:
    """Scales of heads, the tensor or tokens, to broadcast to [num_tokens, num_kv_heads, head_dim]."""
    if scale is None:
        return None
    return scale[..., None] if scale.ndim == 2 else scale[None, :, None]


def _last_of_equal(slots: jax.Array) -> jax.Array:
    """Say of each token whether no later one has the same slot: scatters leave the order of equals open."""
    order = jnp.argsort(slots, stable=True)
    ordered = slots[order]
    last = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones(1, bool)])
    return jnp.zeros_like(last).at[order].set(last, unique_indices=True)
