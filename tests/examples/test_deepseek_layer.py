"""A layer of multi-head latent attention as DeepSeek-V2 has it, in raw JAX, on the functions of this package.

Prefill writes the prompt's latents into pages; each decode step writes one more and attends to all through
the page table. The same layer computed densely, with every head's keys and values expanded from the latents,
gives the same outputs.
"""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jax_paged_attn import (
    PageTable,
    append_paged_mla_kv,
    apply_rope,
    mla_decode,
    mla_fused_prefill,
    mla_q_rope_extract,
    rope_frequencies,
    slot_mapping,
)


@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int = 96
    heads: int = 4
    nope: int = 32
    rope: int = 16
    rank: int = 128
    v_dim: int = 24
    page_size: int = 8

    @property
    def sm_scale(self):
        return (self.nope + self.rope) ** -0.5


class Weights(NamedTuple):
    q: Any  # [hidden, heads * (nope + rope)]
    kv_down: Any  # [hidden, rank + rope]
    kv_norm: Any  # [rank]
    uk: Any  # [heads, nope, rank]
    uv: Any  # [heads, rank, v_dim]
    out: Any  # [heads * v_dim, hidden]


def random_weights(c: Config, key):
    shapes = Weights(
        (c.hidden, c.heads * (c.nope + c.rope)),
        (c.hidden, c.rank + c.rope),
        (c.rank,),
        (c.heads, c.nope, c.rank),
        (c.heads, c.rank, c.v_dim),
        (c.heads * c.v_dim, c.hidden),
    )
    keys = jax.random.split(key, len(shapes))
    weights = [jax.random.normal(k, s) / s[-2:][0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]
    return Weights(*weights)._replace(kv_norm=jnp.ones(c.rank))


def project(c: Config, w: Weights, x, positions):
    """x [tokens, hidden] -> queries [tokens, heads, nope + rope], rotated queries, latents, rotated keys."""
    inv_freq = rope_frequencies(c.rope)
    q = (x @ w.q).reshape(-1, c.heads, c.nope + c.rope)
    q_rope = apply_rope(mla_q_rope_extract(q, nope=c.nope), positions, inv_freq=inv_freq, interleaved=True)
    latent, k_rope = jnp.split(x @ w.kv_down, [c.rank], axis=-1)
    latent = latent * jax.lax.rsqrt(jnp.mean(latent**2, axis=-1, keepdims=True) + 1e-6) * w.kv_norm
    k_rope = apply_rope(k_rope[:, None], positions, inv_freq=inv_freq, interleaved=True)[:, 0]
    return q, q_rope, latent, k_rope


def prefill(c: Config, w: Weights, x, pages, page_table):
    """One prompt x [tokens, hidden], which the only row of the table has room for."""
    positions = jnp.arange(x.shape[0])
    q, q_rope, latent, k_rope = project(c, w, x, positions)
    out, _, _ = mla_fused_prefill(q, q_rope, latent, k_rope, w.uk, w.uv, sm_scale=c.sm_scale)
    slots = slot_mapping(page_table, jnp.zeros_like(positions), positions, page_size=c.page_size)
    return out.reshape(x.shape[0], -1) @ w.out, append_paged_mla_kv(pages, latent, k_rope, slots)


def decode(c: Config, w: Weights, x, pages, page_table):
    """One token of each row x [batch, hidden], the last of those that the table counts."""
    positions = page_table.kv_lens - 1
    q, q_rope, latent, k_rope = project(c, w, x, positions)
    slots = slot_mapping(page_table, jnp.arange(x.shape[0]), positions, page_size=c.page_size)
    pages = append_paged_mla_kv(pages, latent, k_rope, slots)
    absorbed = jnp.einsum("bhn,hnr->bhr", q[..., : c.nope], w.uk)
    latents = mla_decode(absorbed, q_rope, pages, page_table, sm_scale=c.sm_scale)
    heads = jnp.einsum("bhr,hrv->bhv", latents, w.uv)
    return heads.reshape(x.shape[0], -1) @ w.out, pages


def dense(c: Config, w: Weights, x):
    """The whole sequence without absorption, pages, or kernels."""
    q, q_rope, latent, k_rope = project(c, w, x, jnp.arange(x.shape[0]))
    k_nope = jnp.einsum("tr,hnr->thn", latent, w.uk)
    v = jnp.einsum("tr,hrv->thv", latent, w.uv)
    scores = jnp.einsum("qhn,khn->hqk", q[..., : c.nope], k_nope) + jnp.einsum("qhp,kp->hqk", q_rope, k_rope)
    visible = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(visible, c.sm_scale * scores, -jnp.inf))
    return jnp.einsum("hqk,khv->qhv", weights, v).reshape(x.shape[0], -1) @ w.out


def test_prefill_then_decode_equals_dense_attention():
    c, prompts, new = Config(), (13, 20), 5
    w = random_weights(c, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, max(prompts) + new, c.hidden))
    expected = [dense(c, w, x[b, : prompt + new]) for b, prompt in enumerate(prompts)]
    pages = jnp.full((9, c.page_size, c.rank + c.rope), jnp.nan)
    block_tables = jnp.array([[7, 2, 4, -1], [0, 8, 3, 5]])
    for b, prompt in enumerate(prompts):
        row = PageTable.from_block_tables(block_tables[b : b + 1], jnp.array([prompt]))
        out, pages = prefill(c, w, x[b, :prompt], pages, row)
        chex.assert_trees_all_close(out, expected[b][:prompt], atol=2e-5)
    step = jax.jit(decode, static_argnums=0, donate_argnums=3)
    for i in range(new):
        lens = jnp.array(prompts) + i
        tokens = jnp.stack([x[b, prompt + i] for b, prompt in enumerate(prompts)])
        out, pages = step(c, w, tokens, pages, PageTable.from_block_tables(block_tables, lens + 1))
        for b, prompt in enumerate(prompts):
            chex.assert_trees_all_close(out[b], expected[b][prompt + i], atol=2e-5)
