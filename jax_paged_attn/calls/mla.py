"""Latent attention of rows over a paged cache: what is static about a call, its operands, its fold."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import validation
from jax_paged_attn.calls import folding
from jax_paged_attn.dispatch import Operation
from jax_paged_attn.page_table import PageTable
from jax_paged_attn.validation import QUANTIZED_DTYPES

# Channels of a latent that share a scale, where scales belong to tokens.
SCALE_CHANNELS = 128


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static about one batched call. Hashable; dimensions may be symbolic (`jax.export`).

    Attributes
    ----------
    batch, q_len, num_heads : int
        Rows, query tokens of each, and their heads.
    rank, rope_dim : int
        Columns of a latent, which are its keys' first and all of its values, and of the rotated key.
    page_size, num_pages, num_entries : int
        Tokens a page, pages in the pool, entries in ``page_table.indices``.
    dtype, latent_dtype, rope_dtype : numpy.dtype
        Of the query and the output, of cached latents, of cached rotated keys.
    paired : bool
        Whether rotated keys lie in a pool of their own, rather than behind the latents.
    kv_scale : str or None
        What the scales of a quantized cache belong to: "tensor" or, of the latents, "token" (one each
        `SCALE_CHANNELS` channels); None is a scale of 1.
    causal, return_lse : bool
        Whether a query token sees no later ones; whether the log-sum-exp is wanted.
    num_splits : int or None
        Runs that each row's tiles are cut into; None leaves it to the implementation.
    """

    batch: int
    q_len: int
    num_heads: int
    rank: int
    rope_dim: int
    page_size: int
    num_pages: int
    num_entries: int
    dtype: np.dtype
    latent_dtype: np.dtype
    rope_dtype: np.dtype
    paired: bool = False
    kv_scale: str | None = None
    causal: bool = True
    return_lse: bool = False
    num_splits: int | None = None

    @property
    def queries(self) -> int:
        """Queries of a row: each head of each of its query tokens, tokens first."""
        return self.q_len * self.num_heads

    @property
    def is_symbolic(self) -> bool:
        """Whether any dimension is symbolic."""
        return validation.is_symbolic(self)

    @property
    def is_empty(self) -> bool:
        """Whether the shapes alone say that no query has a key."""
        sizes = (self.batch, self.q_len, self.page_size, self.num_pages, self.num_entries)
        return any(dim == 0 for dim in sizes)

    def nonempty(self) -> "Problem":
        """Return the smallest problem of this kind that isn't empty."""
        sizes = ("batch", "q_len", "page_size", "num_pages", "num_entries")
        return dataclasses.replace(self, **{name: max(getattr(self, name), 1) for name in sizes})


class Operands(NamedTuple):
    """What an implementation computes with, of one batched call.

    `q_nope` is [batch, q_len, num_heads, rank], `q_pe` [batch, q_len, num_heads, rope_dim]. `latent_pages`
    are [num_pages, page_size, rank + rope_dim], or [.., rank] beside `rope_pages` [.., rope_dim]. A
    `kv_scale` is float32[1], or float32[num_pages, page_size, rank / SCALE_CHANNELS].
    """

    q_nope: jax.Array
    q_pe: jax.Array
    latent_pages: jax.Array
    rope_pages: jax.Array | None
    page_table: PageTable
    sm_scale: jax.Array
    kv_scale: jax.Array | None = None


def nothing(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Yield (out, lse) of queries without keys."""
    queries = (problem.batch, problem.q_len, problem.num_heads)
    lse = jnp.full(queries, -jnp.inf, jnp.float32) if problem.return_lse else None
    return jnp.zeros((*queries, problem.rank), problem.dtype), lse


def fold(
    problem: Problem, size: int, batched: Operands, operands: Operands
) -> tuple[Problem, Operands] | None:
    """Fold a mapped axis of `size` into the rows; see `calls.attention.fold`."""
    of_tokens = problem.kv_scale == "token"
    pools = ("latent_pages", "rope_pages", *(["kv_scale"] if of_tokens else []))
    if batched.sm_scale or (batched.kv_scale and not of_tokens):
        return None
    pools_mapped = any(getattr(batched, name) for name in pools)

    def joined(name):
        array = getattr(operands, name)
        if array is None:
            return None
        return folding.join(folding.mapped(array, getattr(batched, name), size))

    table, num_pages = folding.fold_table(
        operands.page_table,
        batched.page_table,
        size,
        page_size=problem.page_size,
        num_pages=problem.num_pages,
        pools_mapped=pools_mapped,
    )
    moved = ("q_nope", "q_pe", *(pools if pools_mapped else ()))
    folded = operands._replace(page_table=table, **{name: joined(name) for name in moved})
    sizes = {"batch": size * problem.batch, "num_pages": num_pages, "num_entries": table.indices.shape[0]}
    return dataclasses.replace(problem, **sizes), folded


MLA = Operation("mla", ("mla_decode",), nothing, fold)


class Pools(NamedTuple):
    """The cache as a caller gives it, and what the caller knows its parts by."""

    latent_pages: jax.Array
    rope_pages: jax.Array | None
    latent_name: str
    rope_name: str


def as_pools(latent_pages) -> Pools:
    """Tell one pool from a pair of pools."""
    name = "latent_pages"
    if isinstance(latent_pages, tuple | list):
        expected = "one array or a pair of them (ckv_pages, kpe_pages)"
        validation.check(len(latent_pages) == 2, name, expected, f"{len(latent_pages)} of them")
        names = f"{name}[0]", f"{name}[1]"
        latents, ropes = (validation.as_array(each, x) for each, x in zip(names, latent_pages, strict=True))
        return Pools(latents, ropes, *names)
    return Pools(validation.as_array(name, latent_pages), None, name, name)


def check_pools(pools: Pools, rank: int, rope_dim: int, dtype: np.dtype, of: str) -> None:
    """Check a cache against latents and rotated keys of so many columns, and of `dtype`, that of `of`."""
    latent_pages, rope_pages, latent_name, rope_name = pools
    columns = rank if rope_pages is not None else rank + rope_dim
    expected = f"shape [num_pages, page_size, {columns}]"
    ok = latent_pages.ndim == 3 and latent_pages.shape[-1] == columns
    validation.check(ok, latent_name, expected, f"shape {latent_pages.shape}")
    quantized = latent_pages.dtype.name in QUANTIZED_DTYPES
    expected = f"the dtype of {of}, {dtype}, or one of {QUANTIZED_DTYPES}"
    got = f"dtype {latent_pages.dtype}"
    validation.check(quantized or latent_pages.dtype == dtype, latent_name, expected, got)
    if rope_pages is None:
        return
    validation.check_shape(rope_name, rope_pages, (*latent_pages.shape[:2], rope_dim))
    expected = f"the dtype of {of}, {dtype}, or that of {latent_name}, {latent_pages.dtype}"
    ok = rope_pages.dtype in (dtype, latent_pages.dtype)
    validation.check(ok, rope_name, expected, f"dtype {rope_pages.dtype}")


def scale_kind(
    pools: Pools, kv_scale: jax.Array | None, rank: int, dtype: np.dtype, lead: tuple[int, ...]
) -> str | None:
    """Check the scale of a cache; those of tokens have the axes `lead` before that of channels."""
    kinds: dict[tuple, str] = {(): "tensor"}
    if rank % SCALE_CHANNELS == 0:
        kinds[(*lead, rank // SCALE_CHANNELS)] = f"token and {SCALE_CHANNELS} channels"
    kind = validation.scale_kind("kv_scale", kv_scale, pools.latent_name, pools.latent_pages, kinds)
    if kind in (None, "tensor"):
        return kind
    expected = f"a pair (ckv_pages, kpe_pages) with kpe_pages of {dtype}, as kv_scale is one a token"
    rope_dtype = None if pools.rope_pages is None else pools.rope_pages.dtype
    got = "one pool" if rope_dtype is None else f"kpe_pages of {rope_dtype}"
    validation.check(rope_dtype == dtype, "latent_pages", expected, got)
    return "token"


def describe(
    q_nope: jax.Array,
    q_pe: jax.Array,
    pools: Pools,
    page_table: PageTable,
    kv_scale: jax.Array | None,
    *,
    causal: bool,
    return_lse: bool,
    num_splits: int | None,
) -> Problem:
    """Check the shapes, dtypes and flags of a batched call and describe it."""
    validation.check_bool("causal", causal)
    validation.check_bool("return_lse", return_lse)
    if num_splits is not None:
        validation.check_positive_int("num_splits", num_splits)
    batch, q_len, num_heads, rank = q_nope.shape
    rope_dim = q_pe.shape[-1]
    dtype = np.dtype(q_nope.dtype)
    validation.check(
        dtype.name in validation.DTYPES, "q_nope", f"a dtype of {validation.DTYPES}", f"dtype {dtype}"
    )
    validation.check(q_pe.dtype == dtype, "q_pe", f"the dtype of q_nope, {dtype}", f"dtype {q_pe.dtype}")
    expected = "at least one head and kv_lora_rank at least 1"
    validation.check(0 not in (num_heads, rank), "q_nope", expected, f"shape {q_nope.shape}")
    validation.check(rope_dim != 0, "q_pe", "rope_dim at least 1", f"shape {q_pe.shape}")
    check_pools(pools, rank, rope_dim, dtype, "q_nope")
    validation.check(
        page_table.kv_lens.shape == (batch,),
        "page_table",
        f"{batch} rows, the batch of q_nope",
        f"kv_lens of shape {page_table.kv_lens.shape}",
    )
    num_pages, page_size, _ = pools.latent_pages.shape
    rope_pages = pools.latent_pages if pools.rope_pages is None else pools.rope_pages
    return Problem(
        batch=batch,
        q_len=q_len,
        num_heads=num_heads,
        rank=rank,
        rope_dim=rope_dim,
        page_size=page_size,
        num_pages=num_pages,
        num_entries=page_table.indices.shape[0],
        dtype=dtype,
        latent_dtype=np.dtype(pools.latent_pages.dtype),
        rope_dtype=np.dtype(rope_pages.dtype),
        paired=pools.rope_pages is not None,
        kv_scale=scale_kind(pools, kv_scale, rank, dtype, (num_pages, page_size)),
        causal=causal,
        return_lse=return_lse,
        num_splits=None if num_splits is None else int(num_splits),
    )
