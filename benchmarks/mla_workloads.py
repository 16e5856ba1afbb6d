"""The workloads of latent attention, named by M and their query heads, and their inputs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workloads import normal_pages
from jax_paged_attn import PageTable, reference

COUNTED = "`bytes = sum(kv_lens) * (rank + rope_dim) * itemsize`, each valid latent and rotated key once"
NOPE = 128  # columns of a head before absorption, which the scale of the scores belongs to


@dataclasses.dataclass(frozen=True)
class MlaWorkload:
    """One decode step over a paged cache of latents.

    Attributes
    ----------
    name : str
        What tables and ``results/*.csv`` use.
    kv_lens : tuple of int
        Valid tokens of each row.
    num_heads, rank, rope_dim, page_size, q_len : int
        Heads of a query token, columns of a latent and of a rotated key, tokens of a page, query tokens of a
        row.
    dtype : str
        Of queries and cache.
    """

    name: str
    kv_lens: tuple[int, ...]
    num_heads: int = 128
    rank: int = 512
    rope_dim: int = 64
    page_size: int = 64
    q_len: int = 1
    dtype: str = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """The fewest bytes a call must read: each valid latent and rotated key once."""
        return sum(self.kv_lens) * (self.rank + self.rope_dim) * jnp.dtype(self.dtype).itemsize

    @property
    def num_flops(self) -> int:
        """Of both products, all heads and query tokens over all valid tokens of their rows.

        Examples
        --------
        >>> MlaWorkload("tiny", kv_lens=(10,), num_heads=1).num_flops
        21760
        """
        return 2 * sum(self.kv_lens) * self.q_len * self.num_heads * (2 * self.rank + self.rope_dim)

    def shrunk(self) -> MlaWorkload:
        """Keep pages and columns, at a size that a CPU can run: 2 rows of at most 70 tokens, 8 heads."""
        lens = tuple(n % 71 for n in self.kv_lens[:2])
        return dataclasses.replace(self, kv_lens=lens, num_heads=min(self.num_heads, 8))

    def describe(self) -> str:
        """One readable line, for the results table."""
        lens = self.kv_lens
        lengths = f"{lens[0]}" if len(set(lens)) == 1 else f"{min(lens)} to {max(lens)}"
        tokens = f", {self.q_len} query tokens a row" if self.q_len > 1 else ""
        return (
            f"batch {len(lens)}, {self.num_heads} heads{tokens}, latents {self.rank} + {self.rope_dim}, "
            f"kv length {lengths}, page {self.page_size}"
        )


class MlaCache(NamedTuple):
    """Inputs of one call."""

    q_nope: jax.Array  # [batch, q_len, num_heads, rank]
    q_pe: jax.Array  # [batch, q_len, num_heads, rope_dim]
    latent_pages: jax.Array  # [num_pages, page_size, rank + rope_dim]
    block_tables: jax.Array  # int32[batch, max_pages_per_row]
    kv_lens: jax.Array  # int32[batch]


MIXED = tuple(int(n) for n in np.linspace(1000, 9000, 48))

WORKLOADS = (
    MlaWorkload("M128", (4096,) * 128),
    MlaWorkload("M64", (4096,) * 128, num_heads=64),
    MlaWorkload("M16", (4096,) * 128, num_heads=16),
    MlaWorkload("M1", (65536,)),
    MlaWorkload("M128-mixed", MIXED),
    MlaWorkload("M128-q2", (4096,) * 64, q_len=2),
    MlaWorkload("M128-page16", (4096,) * 128, page_size=16),
    MlaWorkload("M32-256", (4096,) * 128, num_heads=32, rank=256),
)


def sm_scale(workload: MlaWorkload) -> float:
    """The scale of a head's scores before absorption."""
    return (NOPE + workload.rope_dim) ** -0.5


def make_cache(workload: MlaWorkload, seed: int) -> MlaCache:
    """Make random normal queries and latents, with the rows' pages in random order in the pool.

    Examples
    --------
    >>> make_cache(MlaWorkload("tiny", (3, 70), num_heads=2), seed=0).latent_pages.shape
    (3, 64, 576)
    """
    pages = np.array([-(-kv_len // workload.page_size) for kv_len in workload.kv_lens])
    num_pages = max(int(pages.sum()), 1)
    order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    block_tables = np.zeros((len(pages), max(int(pages.max()), 1)), np.int32)
    block_tables[np.arange(block_tables.shape[1]) < pages[:, None]] = order[: int(pages.sum())]
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    lead = (len(pages), workload.q_len, workload.num_heads)
    q_nope, q_pe = (
        jax.random.normal(key, (*lead, columns), workload.dtype)
        for key, columns in zip(keys, (workload.rank, workload.rope_dim), strict=False)
    )
    pool = (num_pages, workload.page_size, workload.rank + workload.rope_dim)
    lens = jnp.asarray(workload.kv_lens, jnp.int32)
    # Of a trained model, scores are a few units large; those of unit normal values would be many.
    return MlaCache(
        q_nope / 4, q_pe, normal_pages(keys[2], pool, workload.dtype), jnp.asarray(block_tables), lens
    )


def expected_output(workload: MlaWorkload, cache: MlaCache) -> jax.Array:
    """Compute the float32 reference of one call, a row at a time."""

    @jax.jit
    def rows(cache: MlaCache) -> jax.Array:
        def one_row(row):
            q_nope, q_pe, block_table, kv_len = row
            table = PageTable.from_block_tables(block_table[None], kv_len[None])
            scale = sm_scale(workload)
            return reference.mla_decode(q_nope[None], q_pe[None], cache.latent_pages, table, sm_scale=scale)

        out = jax.lax.map(one_row, (cache.q_nope, cache.q_pe, cache.block_tables, cache.kv_lens))
        assert isinstance(out, jax.Array)
        return out[:, 0]

    return rows(cache)
