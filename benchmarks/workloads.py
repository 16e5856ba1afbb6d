"""The decode workloads, named by letter, and their inputs.

A workload is data only: lengths, heads, page size. Every benchmark and every peer reads it from here, so a
letter means the same bytes everywhere. What follows the letter is what differs: "A-d64" is A with head_dim
64, "A-16/16" A with those heads, both with lengths that keep A's bytes; "A-contiguous" is A without pages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn import PageTable, reference

COUNTED = """\
`bytes = sum(kv_lens) * num_kv_heads * (d_k + d_v) * itemsize`, each valid K and V element
  once, of a window those in it; with scales of tokens these too"""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One decode step: a query token a row, or a few, over a paged or a contiguous cache.

    Attributes
    ----------
    name : str
        The letter that tables and ``results/*.csv`` use.
    kv_lens : tuple of int
        Valid tokens of each row.
    num_q_heads, num_kv_heads : int
        Heads of the query and of the cache.
    page_size : int
        Tokens in a page; of a contiguous cache, the tokens a row has room for.
    head_dim, v_head_dim : int
        Columns of K (and q), and of V.
    dtype : str
        Dtype of q, and of the cache without `cache_dtype`.
    cache_dtype : str or None
        Of a quantized cache.
    scale : str or None
        What the scales of a quantized cache belong to: "head" or "token".
    num_caches : int
        How many caches of this shape the timed calls take in turn. One cache far above the L2's size is cold
        at every call; a small one is cold only if the caches together are far above it.
    contiguous : bool
        A call of `decode_attention` rather than `paged_attention`: row b is page b.
    q_len : int or None
        Query tokens a row; None is one, without an axis of its own.
    window_left : int or None
        Keys that a query sees before its own; None is all.
    modified : bool
        With a soft cap, ALiBi and sinks, too.
    """

    name: str
    kv_lens: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    page_size: int = 16
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    scale: str | None = None
    num_caches: int = 1
    contiguous: bool = False
    q_len: int | None = None
    window_left: int | None = None
    modified: bool = False

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.kv_lens)

    @property
    def pages_per_row(self) -> tuple[int, ...]:
        """Pages that each row owns."""
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def num_bytes(self) -> int:
        """The fewest bytes a call must read: each K and V element that a query sees once.

        Examples
        --------
        >>> Workload("tiny", kv_lens=(3, 5), num_q_heads=4, num_kv_heads=2).num_bytes
        8192
        """
        head_bytes = (self.head_dim + self.v_head_dim) * jnp.dtype(self.stored_dtype).itemsize
        if self.scale == "token":
            head_bytes += 2 * 4
        seen = self.kv_lens
        if self.window_left is not None:
            seen = tuple(min(n, self.window_left + (self.q_len or 1)) for n in seen)
        return sum(seen) * self.num_kv_heads * head_bytes

    @property
    def stored_dtype(self) -> str:
        """Dtype of the cache."""
        return self.cache_dtype or self.dtype

    def shrunk(self) -> Workload:
        """Keep the heads and pages, at a size that a CPU can run: at most 3 rows of at most 70 tokens."""
        return dataclasses.replace(
            self,
            kv_lens=tuple(n % 71 for n in self.kv_lens[:3]),
            page_size=80 if self.contiguous else self.page_size,
            num_caches=min(self.num_caches, 2),
        )

    def describe(self) -> str:
        """One readable line, for the results table."""
        lens = self.kv_lens
        lengths = f"{lens[0]}" if len(set(lens)) == 1 else f"{min(lens)} to {max(lens)}"
        pages = f"contiguous, room for {self.page_size}" if self.contiguous else f"page {self.page_size}"
        cache = f", cache {self.cache_dtype}" if self.cache_dtype else ""
        scales = f", a scale a {self.scale}" if self.scale else ""
        tokens = f", {self.q_len} query tokens a row" if self.q_len else ""
        window = f", window_left {self.window_left}" if self.window_left is not None else ""
        modified = ", soft cap, ALiBi, sinks" if self.modified else ""
        rotating = f", rotating over {self.num_caches} caches" if self.num_caches > 1 else ""
        return (
            f"batch {self.batch}, heads {self.num_q_heads}/{self.num_kv_heads}, head_dim {self.head_dim}, "
            f"kv length {lengths}, {pages}{cache}{scales}{tokens}{window}{modified}{rotating}"
        )


class Cache(NamedTuple):
    """Inputs of one call, pages in the NHD layout; a contiguous cache is one whose row b is page b."""

    q: jax.Array  # [batch, num_q_heads, head_dim], or with q_len [batch, q_len, num_q_heads, head_dim]
    k_pages: jax.Array  # [num_pages, page_size, num_kv_heads, head_dim]
    v_pages: jax.Array  # [num_pages, page_size, num_kv_heads, v_head_dim]
    block_tables: jax.Array  # int32[batch, max_pages_per_row]
    kv_lens: jax.Array  # int32[batch]
    k_scale: jax.Array | None = None  # float32[num_kv_heads], or [num_pages, page_size, num_kv_heads]
    v_scale: jax.Array | None = None
    modifiers: dict[str, jax.Array] | None = None  # further keyword arguments


def _skewed_lengths() -> tuple[int, ...]:
    lengths = np.exp(np.random.default_rng(0).normal(7.6, 1.1, 128))
    return tuple(int(n) for n in np.clip(lengths, 16, 32768))


def _short_lengths() -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(0).integers(0, 200, 300))


def _of_bytes() -> tuple[Workload, ...]:
    """The workloads of quantized caches."""
    e4m3, gqa = "float8_e4m3fn", functools.partial(Workload, num_q_heads=32, num_kv_heads=8)
    a = gqa("A-e4m3", kv_lens=(4096,) * 64, cache_dtype=e4m3)
    shape = functools.partial(dataclasses.replace, a)
    return (
        a,
        shape(name="A-e4m3-page64", page_size=64),
        shape(name="A-e5m2", cache_dtype="float8_e5m2"),
        shape(name="A-int8", cache_dtype="int8", scale="head"),
        shape(name="A-e4m3-head", scale="head"),
        shape(name="A-e4m3-token", scale="token"),
        shape(name="A-e4m3-d64", kv_lens=(8192,) * 64, head_dim=64, v_head_dim=64),
        shape(name="A-e4m3-d256", kv_lens=(2048,) * 64, head_dim=256, v_head_dim=256),
        gqa("B-e4m3", kv_lens=(131072,), cache_dtype=e4m3),
        gqa("C-e4m3", kv_lens=_skewed_lengths(), cache_dtype=e4m3),
        Workload("E-e4m3", (4096,) * 64, num_q_heads=28, num_kv_heads=4, page_size=64, cache_dtype=e4m3),
    )


WORKLOADS = (
    Workload("A", kv_lens=(4096,) * 64, num_q_heads=32, num_kv_heads=8),
    Workload("A2", kv_lens=(2048,) * 128, num_q_heads=64, num_kv_heads=8),
    Workload("B", kv_lens=(131072,), num_q_heads=32, num_kv_heads=8),
    Workload("C", kv_lens=_skewed_lengths(), num_q_heads=32, num_kv_heads=8),
    # 34 MB: it fits in the L2, so "D" is a warm time on purpose and "D-rotating" the cold one.
    Workload("D", kv_lens=(1024,) * 8, num_q_heads=32, num_kv_heads=8),
    Workload("D-rotating", kv_lens=(1024,) * 8, num_q_heads=32, num_kv_heads=8, num_caches=4),
    Workload("E", kv_lens=(4096,) * 64, num_q_heads=28, num_kv_heads=4, page_size=64),
    Workload("F", kv_lens=(131072,) + (128,) * 63, num_q_heads=32, num_kv_heads=8),
    # 129 MB a cache: twice the L2 is too little to be sure that no page is left over from the last call.
    Workload("S", kv_lens=_short_lengths(), num_q_heads=32, num_kv_heads=8, num_caches=4),
    Workload("A-d64", kv_lens=(8192,) * 64, num_q_heads=32, num_kv_heads=8, head_dim=64, v_head_dim=64),
    Workload("A-d256", kv_lens=(2048,) * 64, num_q_heads=32, num_kv_heads=8, head_dim=256, v_head_dim=256),
    Workload("A-16/16", kv_lens=(2048,) * 64, num_q_heads=16, num_kv_heads=16),
    Workload("A-8/1", kv_lens=(32768,) * 64, num_q_heads=8, num_kv_heads=1),
    Workload("A-q4", kv_lens=(4096,) * 64, num_q_heads=32, num_kv_heads=8, q_len=4),
    # The window lets all keys through, so that the bytes are A's.
    Workload(
        "A-modified", kv_lens=(4096,) * 64, num_q_heads=32, num_kv_heads=8, window_left=4095, modified=True
    ),
    Workload("A-1024", kv_lens=(1024,) * 64, num_q_heads=32, num_kv_heads=8),
    Workload("A-1024-of-32768", kv_lens=(32768,) * 64, num_q_heads=32, num_kv_heads=8, window_left=1023),
    Workload("A-71/1", kv_lens=(32768,) * 64, num_q_heads=71, num_kv_heads=1),
    Workload(
        "A-contiguous", kv_lens=(4096,) * 64, num_q_heads=32, num_kv_heads=8, page_size=4096, contiguous=True
    ),
    # Room above the longest row, as a cache of fixed size has it.
    Workload(
        "C-contiguous",
        kv_lens=_skewed_lengths(),
        num_q_heads=32,
        num_kv_heads=8,
        page_size=20480,
        contiguous=True,
    ),
    *_of_bytes(),
)


def make_cache(workload: Workload, seed: int) -> Cache:
    """Make random normal q, K and V, with the rows' pages in random order in the pool.

    Parameters
    ----------
    workload : Workload
        The shapes.
    seed : int
        Another seed gives other values and another page order.

    Returns
    -------
    Cache
        On the default device.

    Examples
    --------
    >>> tiny = Workload("tiny", kv_lens=(3, 20), num_q_heads=4, num_kv_heads=2)
    >>> cache = make_cache(tiny, seed=0)
    >>> cache.k_pages.shape, cache.block_tables.shape
    ((3, 16, 2, 128), (2, 2))
    """
    if workload.contiguous:
        num_pages, block_tables = workload.batch, np.arange(workload.batch, dtype=np.int32)[:, None]
    else:
        pages = np.array(workload.pages_per_row)
        num_pages = max(int(pages.sum()), 1)
        order = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
        block_tables = np.zeros((workload.batch, max(int(pages.max()), 1)), np.int32)
        # Row-major over the used entries: row b's pages are the next pages[b] of the shuffled pool.
        used = np.arange(block_tables.shape[1]) < pages[:, None]
        block_tables[used] = order[: int(pages.sum())]

    q, k_pages, v_pages = _normal(workload, num_pages, jax.random.key(seed, impl="rbg"))
    lens = jnp.asarray(workload.kv_lens, jnp.int32)
    scales = _scales(workload, k_pages)
    return Cache(q, k_pages, v_pages, jnp.asarray(block_tables), lens, *scales, _modifiers(workload))


def _modifiers(workload: Workload) -> dict[str, jax.Array]:
    modifiers = {}
    if workload.window_left is not None:
        modifiers["window_left"] = jnp.int32(workload.window_left)
    if workload.modified:
        heads = jnp.arange(workload.num_q_heads, dtype=jnp.float32)
        modifiers |= {"soft_cap": jnp.float32(30.0), "alibi_slopes": 2.0 ** (-8 - heads / 4)}
        modifiers["sinks"] = heads / 8
    return modifiers


def _scales(workload: Workload, pages: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """Scales of K and V that differ from one another, about as large as the cache's values are small."""
    if workload.scale is None:
        return None, None
    shape = pages.shape[:-1] if workload.scale == "token" else pages.shape[2:3]
    size = 1 / INT8_DEVIATION if workload.cache_dtype == "int8" else 1.0
    steps = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape) % 7
    return size * (1 + steps / 8), size * (1.5 - steps / 16)


# The key is of XLA's own generator ("rbg"): threefry would need several times the cache in temporary memory.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _normal(workload: Workload, num_pages: int, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    pool = (num_pages, workload.page_size, workload.num_kv_heads)
    q_key, k_key, v_key = jax.random.split(key, 3)
    lead = (workload.batch,) if workload.q_len is None else (workload.batch, workload.q_len)
    q = jax.random.normal(q_key, (*lead, workload.num_q_heads, workload.head_dim), workload.dtype)
    k = normal_pages(k_key, (*pool, workload.head_dim), workload.stored_dtype)
    return q, k, normal_pages(v_key, (*pool, workload.v_head_dim), workload.stored_dtype)


FILLED_AT_ONCE = 1 << 24  # elements of a pool
INT8_DEVIATION = 32  # of normal values, of which int8 holds all but one in 15000 or so


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal_pages(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Fill a pool some pages at a time: all at once takes as much again for the random bits."""
    drawn = "bfloat16" if jnp.dtype(dtype).itemsize == 1 else dtype
    some = min(max(FILLED_AT_ONCE // math.prod(shape[1:]), 1), shape[0])

    def fill(i: jax.Array, pages: jax.Array) -> jax.Array:
        values = jax.random.normal(jax.random.fold_in(key, i), (some, *shape[1:]), drawn)
        if dtype == "int8":
            values = jnp.clip(jnp.rint(values * INT8_DEVIATION), -128, 127)
        values = values.astype(dtype)
        # The last pages' start is clipped, so that they overlap the ones before.
        return jax.lax.dynamic_update_slice_in_dim(pages, values, i * some, axis=0)

    return jax.lax.fori_loop(0, -(-shape[0] // some), fill, jnp.zeros(shape, dtype))


def to_layout(pages: jax.Array, kv_layout: str) -> jax.Array:
    """NHD pages, or the scales of their tokens, as a new contiguous array of `kv_layout` ("HND" or "NHD")."""
    return pages if kv_layout == "NHD" else jnp.swapaxes(pages, 1, 2)


@jax.jit
def expected_output(cache: Cache) -> jax.Array:
    """Compute the float32 reference of one call, a row at a time: its memory is that of the longest row.

    Parameters
    ----------
    cache : Cache
        The inputs, of a paged or a contiguous cache.

    Returns
    -------
    jax.Array
        float32 [batch, num_q_heads, v_head_dim], or with q_len [batch, q_len, num_q_heads, v_head_dim].
    """

    options: dict[str, Any] = cache.modifiers or {}

    def one_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, block_table, kv_len = row
        page_table = PageTable.from_block_tables(block_table[None], kv_len[None])
        out = reference.paged_attention(
            q[None],
            cache.k_pages,
            cache.v_pages,
            page_table,
            kv_layout="NHD",
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            **options,
        )
        assert isinstance(out, jax.Array)
        return out[0]

    return jax.lax.map(one_row, (cache.q, cache.block_tables, cache.kv_lens))
