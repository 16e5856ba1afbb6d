"""The workloads of cache writes, named by letter, their inputs, and what has to come of them.

As in `benchmarks.workloads`: a workload is data only, and what follows the letter is what differs. W1 is a
decode step, a token in each of many sequences; W2 a prefill of as many tokens as one launch takes.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_paged_attn
from benchmarks.checked import Check
from benchmarks.workloads import normal_pages
from jax_paged_attn import reference
from jax_paged_attn.testing_append import rotation_tolerance
from jax_paged_attn.validation import LAYOUT_AXES

COUNTED = """\
`bytes = num_tokens * num_kv_heads * (d_k + d_v) * (itemsize + pool_itemsize)`, K and V
  read and written, and 4 a slot; with rotation also q, read and written, and 4 a position; with scales of
  tokens also these, read and written"""

type Arrays = dict[str, jax.Array]

# What `append` updates, in the order of its public functions' results.
POOLS = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
E4M3 = "float8_e4m3fn"
SCALES = {"k_scale": 0.05, "v_scale": 0.04}  # of the tensor; normal values then lie within e4m3's range


@dataclasses.dataclass(frozen=True)
class AppendWorkload:
    """One write of new tokens into a page pool.

    Attributes
    ----------
    name : str
        The letter that tables and ``results/*.csv`` use.
    num_sequences, tokens_each : int
        Sequences in the pool, and tokens that a call appends to each.
    num_calls : int
        Calls that follow one another, each with tokens and slots of its own, before the first comes again:
        so many that together they are far above the L2's size.
    pool_dtype : str
        Dtype of the pools.
    scale : str or None
        What the scales of a quantized pool belong to: "tensor" or "token".
    num_q_heads : int or None
        With it, q and k are rotated.
    dtype : str
        Dtype of the new tokens and of q.
    num_kv_heads, head_dim, page_size : int
        Shapes of tokens and pages.
    num_pages : int
        Of the pool, most of it other sequences'.
    history : int
        Tokens that a sequence has at most before the first call.
    """

    name: str
    num_sequences: int
    tokens_each: int
    num_calls: int
    pool_dtype: str = "bfloat16"
    scale: str | None = None
    num_q_heads: int | None = None
    dtype: str = "bfloat16"
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    num_pages: int = 65536
    history: int = 4096

    @property
    def num_tokens(self) -> int:
        """New tokens of a call."""
        return self.num_sequences * self.tokens_each

    @property
    def num_bytes(self) -> int:
        """The fewest bytes a call must read and write.

        Examples
        --------
        >>> AppendWorkload("tiny", num_sequences=2, tokens_each=1, num_calls=1).num_bytes
        16392
        """
        itemsize, pool_itemsize = jnp.dtype(self.dtype).itemsize, jnp.dtype(self.pool_dtype).itemsize
        token = 2 * self.num_kv_heads * self.head_dim * (itemsize + pool_itemsize) + 4
        if self.scale == "token":
            token += 2 * self.num_kv_heads * (4 + 4)
        if self.num_q_heads is not None:
            token += self.num_q_heads * self.head_dim * 2 * itemsize + 4
        return self.num_tokens * token

    def shrunk(self) -> AppendWorkload:
        """Keep the heads and pages, at a size that a CPU can run: 2 calls of at most 27 tokens."""
        return dataclasses.replace(
            self,
            num_sequences=3,
            tokens_each=min(self.tokens_each, 9),
            num_calls=2,
            num_pages=24,
            history=40,
        )

    def describe(self) -> str:
        """One readable line, for the results table."""
        each = "a token" if self.tokens_each == 1 else f"{self.tokens_each} tokens"
        rotated = f", {self.num_q_heads} heads of q rotated" if self.num_q_heads is not None else ""
        scale = {"tensor": ", one scale", "token": ", a scale a token and head"}.get(self.scale or "", "")
        return (
            f"{each} to each of {self.num_sequences} sequences, {self.num_kv_heads} kv heads{rotated}, "
            f"head_dim {self.head_dim}, page {self.page_size}, pool {self.pool_dtype}{scale}, "
            f"rotating over {self.num_calls} calls"
        )


WORKLOADS = (
    AppendWorkload("W1", num_sequences=128, tokens_each=1, num_calls=256),
    AppendWorkload("W1-rope", num_sequences=128, tokens_each=1, num_calls=96, num_q_heads=32),
    AppendWorkload("W2", num_sequences=4, tokens_each=4096, num_calls=2),
    AppendWorkload(
        "W2-e4m3", num_sequences=4, tokens_each=4096, num_calls=3, pool_dtype=E4M3, scale="tensor"
    ),
    AppendWorkload(
        "W2-token", num_sequences=4, tokens_each=4096, num_calls=3, pool_dtype=E4M3, scale="token"
    ),
    AppendWorkload(
        "W-rope",
        num_sequences=4,
        tokens_each=4096,
        num_calls=2,
        pool_dtype=E4M3,
        scale="tensor",
        num_q_heads=32,
    ),
)


def append(
    pools: Arrays, new: Arrays, *, module: ModuleType = jax_paged_attn, **options: Any
) -> tuple[Arrays, jax.Array | None]:
    """Call `append_paged_kv`, or with a q `rope_append_paged_kv`; gives the pools and the rotated q."""
    if "q" in new:
        q, *updated = module.rope_append_paged_kv(**pools, **new, **options)
    else:
        q, updated = None, module.append_paged_kv(**pools, **new, **options)
    return dict(zip(POOLS, updated, strict=False)), q


def place(workload: AppendWorkload, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make the slots and positions of all calls' tokens: int32 [num_calls, num_tokens] each.

    Pages are in random order. A call's tokens are those of the first sequence in order, then the second's;
    each call goes on where the one before ended, so that no slot comes twice.

    Examples
    --------
    >>> tiny = AppendWorkload("tiny", num_sequences=2, tokens_each=3, num_calls=2, num_pages=9, history=20)
    >>> slots, positions = place(tiny, seed=0)
    >>> positions.tolist()
    [[10, 11, 12, 12, 13, 14], [13, 14, 15, 15, 16, 17]]
    >>> slots.tolist()
    [[74, 75, 76, 44, 45, 46], [77, 78, 79, 47, 96, 97]]
    """
    w, rng = workload, np.random.default_rng(seed)
    pages_each = -(-(w.history + w.num_calls * w.tokens_each) // w.page_size)
    tables = rng.permutation(w.num_pages)[: w.num_sequences * pages_each].reshape(w.num_sequences, pages_each)
    first = rng.integers(0, w.history, w.num_sequences)[:, None]
    call = np.arange(w.num_calls)[:, None, None]
    positions = first + call * w.tokens_each + np.arange(w.tokens_each)
    pages = tables[np.arange(w.num_sequences)[:, None], positions // w.page_size]
    slots = pages * w.page_size + positions % w.page_size
    shape = (w.num_calls, w.num_tokens)
    return slots.reshape(shape).astype(np.int32), positions.reshape(shape).astype(np.int32)


class Inputs(NamedTuple):
    """What all calls get beside the pools, by the public functions' names."""

    tokens: Arrays  # with leading axes [num_calls, num_tokens]
    shared: Arrays


def make_inputs(workload: AppendWorkload, seed: int) -> Inputs:
    """Make random normal tokens for all calls."""
    w = workload
    tokens = _random_tokens(w, jax.random.key(seed, impl="rbg"))
    slots, positions = place(w, seed)
    tokens["slot_mapping"] = jnp.asarray(slots)
    shared: Arrays = {}
    if w.scale == "tensor":
        shared |= {name: jnp.float32(scale) for name, scale in SCALES.items()}
    if w.num_q_heads is not None:
        tokens["positions"] = jnp.asarray(positions)
        shared["inv_freq"] = jax_paged_attn.rope_frequencies(w.head_dim)
    return Inputs(tokens, shared)


@functools.partial(jax.jit, static_argnums=0)
def _random_tokens(workload: AppendWorkload, key: jax.Array) -> Arrays:
    w, lead = workload, (workload.num_calls, workload.num_tokens)
    heads = {"k_new": w.num_kv_heads, "v_new": w.num_kv_heads, "q": w.num_q_heads}
    tokens = {}
    for i, (name, num_heads) in enumerate(heads.items()):
        if num_heads is not None:
            shape = (*lead, num_heads, w.head_dim)
            tokens[name] = jax.random.normal(jax.random.fold_in(key, i), shape, w.dtype)
    if w.scale == "token":
        for i, name in enumerate(SCALES, start=len(heads)):
            shape = (*lead, w.num_kv_heads)
            tokens[name] = jax.random.uniform(jax.random.fold_in(key, i), shape, minval=0.02, maxval=0.1)
    return tokens


def calls_arguments(workload: AppendWorkload, inputs: Inputs) -> list[Arrays]:
    """Cut what each call gets beside the pools."""
    cut = jax.jit(lambda tokens, i: {name: x[i] for name, x in tokens.items()})
    return [cut(inputs.tokens, i) | inputs.shared for i in range(workload.num_calls)]


def pool_shapes(workload: AppendWorkload, layout: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The pools that a workload writes into."""
    w = workload
    sizes = {"num_pages": w.num_pages, "num_kv_heads": w.num_kv_heads, "page_size": w.page_size}
    lead = tuple(sizes[axis] for axis in LAYOUT_AXES[layout][:3])
    pages = jax.ShapeDtypeStruct((*lead, w.head_dim), w.pool_dtype)
    scales = jax.ShapeDtypeStruct(lead, "float32")
    shapes = dict(zip(POOLS, (pages, pages, scales, scales), strict=True))
    return {name: shapes[name] for name in (POOLS if w.scale == "token" else POOLS[:2])}


def make_pools(workload: AppendWorkload, layout: str, seed: int) -> Arrays:
    """Make pools full of random normal values."""
    key = jax.random.key(seed, impl="rbg")
    return {
        name: normal_pages(jax.random.fold_in(key, i), x.shape, x.dtype.name)
        for i, (name, x) in enumerate(pool_shapes(workload, layout).items())
    }


class Expected(NamedTuple):
    """What has to come of all calls, by the reference."""

    slots: Arrays  # what each token's slot holds: [num_calls * num_tokens, num_kv_heads, ...]
    q: jax.Array | None  # float32 [num_calls, num_tokens, num_q_heads, head_dim]


@functools.partial(jax.jit, static_argnums=0)
def expect(workload: AppendWorkload, inputs: Inputs) -> Expected:
    """Compute what has to come of all calls, each token alone in a pool of one slot: all at the same time."""
    one_slot = dataclasses.replace(workload, num_pages=1, page_size=1)
    pools = {name: jnp.zeros(x.shape, x.dtype) for name, x in pool_shapes(one_slot, "NHD").items()}

    def one(token: Arrays) -> tuple[Arrays, jax.Array | None]:
        new = {name: x[None] for name, x in token.items()} | {"slot_mapping": jnp.zeros(1, jnp.int32)}
        written, q = append(pools, new | inputs.shared, module=reference, kv_layout="NHD")
        return {name: x[0, 0] for name, x in written.items()}, None if q is None else q[0]

    written, q = jax.vmap(jax.vmap(one))(inputs.tokens)
    return Expected({name: x.reshape(-1, *x.shape[2:]) for name, x in written.items()}, q)


def make_check(
    workload: AppendWorkload, layout: str, before: Arrays, inputs: Inputs, expected: Expected
) -> Check:
    """Make the check of a round of calls: ``check((pools, results))``.

    What is not rotated has to be the reference's to the bit, and what is within the rounding of its dtype.
    What no call writes has to have the bits that it had.
    """

    def check(outputs: tuple[Arrays, list[Any]]) -> None:
        pools, results = outputs
        slots = inputs.tokens["slot_mapping"].reshape(-1)
        wrong = jax.device_get(_count_wrong(workload, layout, pools, before, slots, expected.slots))
        if expected.q is not None:
            wrong["q"] = _count_far(jnp.stack(results), expected.q)
        wrong = {name: int(count) for name, count in wrong.items() if count}
        assert not wrong, f"values that differ: {wrong}"

    return check


@functools.partial(jax.jit, static_argnums=(0, 1))
def _count_wrong(
    workload: AppendWorkload,
    layout: str,
    pools: Arrays,
    before: Arrays,
    slots: jax.Array,
    expected: Arrays,
) -> Arrays:
    w = workload
    page, offset = jnp.divmod(slots, w.page_size)
    at = {"HND": (page, slice(None), offset), "NHD": (page, offset)}[layout]
    written = jnp.zeros((w.num_pages, w.page_size), bool).at[page, offset].set(True)
    written = jnp.expand_dims(written, LAYOUT_AXES[layout].index("num_kv_heads"))
    wrong = {}
    for name, pool in pools.items():
        kept = _bits(pool) == _bits(before[name])
        wrong[f"{name} elsewhere"] = jnp.sum(~(kept | (written[..., None] if pool.ndim == 4 else written)))
        tokens = _bits(pool)[at]
        if name == "k_pages" and w.num_q_heads is not None:
            wrong[name] = _count_far(jax.lax.bitcast_convert_type(tokens, pool.dtype), expected[name])
        else:
            wrong[name] = jnp.sum(tokens != _bits(expected[name]))
    return wrong


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@jax.jit
def _count_far(values: jax.Array, expected: jax.Array) -> jax.Array:
    """How many rotated values are not within the rounding of their dtype."""
    atol, rtol = rotation_tolerance(values.dtype)
    values, expected = values.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.sum(~(jnp.abs(values - expected) <= atol + rtol * jnp.abs(expected)))
