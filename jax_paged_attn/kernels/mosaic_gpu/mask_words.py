"""A mask of drafts as bits: a word for 32 keys, made before the kernel, which can't look single values up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .integers import ceil_div
from .plan import Plan

i32 = jnp.int32
WORD = 32
MAX_WORDS = 4


def num_words(mask_len: int) -> int:
    return ceil_div(mask_len, WORD)


def pack(plan: Plan, mask: jax.Array) -> dict[str, jax.Array]:
    """Pack a mask bool[batch, q_len, mask_len].

    Returns
    -------
    dict
        "mask_words", int32[batch, tiles of a kv head, words, columns of a tile]; and "mask_seen",
        int32[batch, words], whose bits tell which keys any query sees.
    """
    batch, q_len, mask_len = mask.shape
    words = num_words(mask_len)
    bits = jnp.pad(mask, ((0, 0), (0, 0), (0, words * WORD - mask_len))).reshape(batch, q_len, words, WORD)

    def packed(bits: jax.Array) -> jax.Array:
        values = jnp.where(bits, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), jnp.uint32(0))
        return lax.bitcast_convert_type(jnp.sum(values, axis=-1, dtype=jnp.uint32), i32)

    # Columns past the last query's are as the last query's: their results are dropped.
    token = jnp.arange(plan.head_groups * plan.tile_heads) // plan.problem.group_size
    of_columns = packed(bits)[:, jnp.minimum(token, q_len - 1)]
    of_tiles = of_columns.reshape(batch, plan.head_groups, plan.tile_heads, words)
    return {"mask_words": of_tiles.swapaxes(2, 3), "mask_seen": packed(bits.any(axis=1))}


def bit(word_of: Callable[[int], Any], words: int, column: jax.Array) -> jax.Array:
    """Whether bit `column`, of at least 0, is set in words that `word_of` gives in the shape of `column`."""
    word = word_of(0)
    for w in range(1, words):
        word = jnp.where(column >= w * WORD, word_of(w), word)
    return (lax.shift_right_logical(word, column & (WORD - 1)) & 1) > 0
