"""`cascade_attention`: shared prefixes at several levels, against one call over whole sequences."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jax_paged_attn import (
    PageTable,
    cascade_attention,
    explain,
    ragged_paged_attention,
    reference,
    testing,
)

type Arrays = tuple[jax.Array, jax.Array, jax.Array]

PAGE_SIZE, WIDTH = 16, 3
SHARED, TWO = (32,), (16, 48)  # whole pages, so that one table can list them all
OWN = (40, 3, 1, 20, 7)
GROUPS = (0, 0, 1, 1, 1)  # which of the two each sequence continues
PADDING = 2


def inputs(q_lens=(4, 1, 1, 3, 2), dtype="bfloat16") -> tuple[Arrays, list[tuple[PageTable, Any]], PageTable]:
    """(q, k_pages, v_pages), three levels, and the table of whole sequences; unused slots are NaN."""
    rng = np.random.default_rng(0)
    lens = [SHARED, TWO, OWN]
    rows = [[-(-n // PAGE_SIZE) for n in level] for level in lens]
    used = sum(map(sum, rows))
    ids = iter(rng.permutation(used + 2).tolist())
    k, v = np.full((2, used + 2, 2, PAGE_SIZE, 64), np.nan)
    tables = []
    for level, counts in zip(lens, rows, strict=True):
        pages = [[next(ids) for _ in range(n)] for n in counts]
        for kv_len, row in zip(level, pages, strict=True):
            for i, page in enumerate(row):
                n = min(kv_len - i * PAGE_SIZE, PAGE_SIZE)
                k[page, :, :n], v[page, :, :n] = rng.standard_normal((2, 2, n, 64))
        tables.append(pages)
    padded = [[row + [-1] * (WIDTH - len(row)) for row in pages] for pages in tables]
    whole = [tables[0][0] + tables[1][group] + padded[2][row] for row, group in enumerate(GROUPS)]
    whole = [row + [-1] * (8 - len(row)) for row in whole]
    whole_lens = [SHARED[0] + TWO[group] + OWN[row] for row, group in enumerate(GROUPS)]
    ends = np.cumsum([0, *q_lens]).tolist()
    bounds = [[0, ends[-1]], [0, ends[2], ends[-1]], ends]
    levels = [
        (PageTable.from_block_tables(table, n), jnp.array(indptr))
        for table, n, indptr in zip(padded, lens, bounds, strict=True)
    ]
    q = rng.standard_normal((ends[-1] + PADDING, 4, 64))
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return (q, k, v), levels, PageTable.from_block_tables(whole, whole_lens)


def attend(args: Arrays, levels, **options):
    return cascade_attention(*args, levels, return_lse=True, **options)


# Compiled once a shape.
@functools.partial(jax.jit, static_argnames="causal")
def whole_sequences(args: Arrays, whole, q_indptr, **options):
    return reference.ragged_paged_attention(*args, whole, q_indptr, return_lse=True, **options)


@functools.partial(jax.jit, static_argnames="causal")
def expected(args: Arrays, levels, **options):
    return reference.cascade_attention(*args, levels, return_lse=True, **options)


ALL: dict[str, Any] = {
    "sinks": jnp.array([1.0, -jnp.inf, 4.0, 0.0]),
    "soft_cap": 2.0,
    "alibi_slopes": jnp.array([0.5, 0.01, 0.0, 0.1]),
    "sm_scale": 0.3,
    "mask": jnp.arange(13)[:, None] % 3 > 0,  # over one key, which every last row has
}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {}), ("float32", ALL), ("bfloat16", {"causal": False})],
    ids=["plain", "all", "not_causal"],
)
def test_the_same_as_one_call_over_whole_sequences(dtype, options):
    args, levels, whole = inputs(dtype=dtype)
    right = whole_sequences(args, whole, levels[-1][1], **options)
    testing.assert_close(attend(args, levels, num_splits=2 if options else None, **options), right)
    testing.assert_close(expected(args, levels, **options), right)


def test_a_window_bounds_the_last_level_only():
    """By a mask over whole sequences, which decides about every key."""
    args, levels, whole = inputs(q_lens=(1, 1, 1, 1, 1))
    kv_lens, window_left = np.asarray(whole.kv_lens), 2
    mask_len = int(kv_lens.max())
    key = np.arange(mask_len) - mask_len + kv_lens[:, None]
    first_own = kv_lens - np.array(OWN)
    mask = (key < first_own[:, None]) | (key >= kv_lens[:, None] - 1 - window_left)
    mask = jnp.pad(jnp.asarray(mask), ((0, PADDING), (0, 0)))
    right = whole_sequences(args, whole, levels[-1][1], mask=mask)
    testing.assert_close(attend(args, levels, window_left=window_left), right)
    testing.assert_close(expected(args, levels, window_left=window_left), right)


def test_one_level_is_a_ragged_call():
    args, levels, _ = inputs()
    options: dict[str, Any] = {"window_left": 5, "sinks": jnp.ones(4)}
    one = ragged_paged_attention(*args, *levels[-1], return_lse=True, **options)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), one)
    testing.assert_close(attend(args, levels[-1:], **options), exact)
    assert one[0].dtype == attend(args, levels[-1:], **options)[0].dtype


def test_tokens_that_a_level_leaves_out():
    args, levels, _ = inputs()
    (shared, bounds), two, own = levels
    with_all = attend(args, levels)
    out, lse = attend(args, [(shared, jnp.array([0, 5])), two, own])
    chex.assert_trees_all_equal((out[:5], lse[:5]), (with_all[0][:5], with_all[1][:5]))
    without = whole_sequences(args, *own)
    alone, _ = attend(args, [(shared, jnp.array([0, 0])), (two[0], jnp.zeros_like(two[1])), own])
    testing.assert_close(alone, without[0])
    # Padding, and tokens that belong to no sequence though a prefix is said to serve them.
    out, lse = attend(args, [(shared, bounds + jnp.array([0, PADDING])), two, own])
    chex.assert_trees_all_equal((out, lse), with_all)
    assert not out[-PADDING:].any()
    assert jnp.isneginf(lse[-PADDING:]).all()
    nobody = PageTable.from_block_tables(np.zeros((0, 2), int), np.zeros(0, int)), [0]
    chex.assert_trees_all_equal(attend(args, [nobody, *levels]), with_all)
    out, lse = attend(args, [*levels, nobody])
    assert not out.any()
    assert jnp.isneginf(lse).all()


def test_prefixes_that_end_within_a_page():
    args, levels, _ = inputs()
    (shared, bounds), *others = levels
    changed = [(dataclasses.replace(shared, kv_lens=jnp.array([21])), bounds), *others]
    testing.assert_close(attend(args, changed), expected(args, changed))


def test_jit_and_vmap():
    (q, k, v), levels, whole = inputs()
    both = jnp.stack([q, -q])
    results = jax.jit(jax.vmap(lambda q: attend((q, k, v), levels)))(both)
    for i in range(2):
        right = whole_sequences((both[i], k, v), whole, levels[-1][1])
        testing.assert_close(jax.tree.map(lambda x: x[i], results), right)  # noqa: B023


def test_a_prefix_is_one_row():
    args, levels, _ = inputs()
    problem = explain(cascade_attention, *args, levels, target="cpu").problem
    assert (problem.batch, problem.total_q, problem.causal) == (1, args[0].shape[0], False)
    assert explain(cascade_attention, *args, levels, target="sm_90").implementation == "xla"


TABLE = PageTable.from_block_tables([[0, 1]], [20])
MISTAKES: list[tuple[Any, str]] = [
    ([], "levels"),
    (iter([]), "levels"),
    (TABLE, "levels"),
    ([TABLE], r"levels\[0\]"),
    ([(TABLE, [0, 1]), (TABLE, [0, 1], 1)], r"levels\[1\]"),
    ([(TABLE, [0, 1]), ([[0]], [0, 1])], r"levels\[1\]\[0\]"),
    ([(PageTable.from_block_tables([0, 1], 20), [0, 1])], r"levels\[0\]\[0\]"),
    ([(TABLE, [0, 1]), (TABLE, [0, 1, 2])], r"levels\[1\]\[1\]"),
    ([(TABLE, [0.5, 1])], r"levels\[0\]\[1\]"),
]


@pytest.mark.parametrize(
    ("levels", "name"), MISTAKES, ids=[f"{i}-{name}" for i, (_, name) in enumerate(MISTAKES)]
)
def test_mistakes_in_levels_are_named(levels, name):
    args, *_ = inputs()
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        cascade_attention(*args, levels)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"causal": 1}, "causal"),
        ({"return_lse": 1}, "return_lse"),
        ({"mask": jnp.ones((3, 2), bool)}, "mask"),
        ({"sinks": jnp.ones(3)}, "sinks"),
        ({"config": 3}, "config"),
    ],
    ids=str,
)
def test_mistakes_in_options_are_named(change, name):
    args, levels, _ = inputs()
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+"):
        cascade_attention(*args, levels, **change)


@pytest.mark.parametrize(
    ("level", "kv_len", "bound", "name"),
    [(0, 49, 11, "[0].kv_lens"), (0, 32, 20, "[1]"), (2, 1, 11, "[0].kv_lens")],
    ids=str,
)
def test_wrong_values(level, kv_len, bound, name):
    args, levels, _ = inputs()
    table, indptr = levels[level]
    table = dataclasses.replace(table, kv_lens=table.kv_lens.at[0].set(kv_len))
    levels[level] = table, indptr.at[-1].set(bound)
    with pytest.raises(ValueError, match=re.escape(f"levels[{level}]{name}: expected ")):
        cascade_attention(*args, levels, validate_values=True)


def test_value_checks_under_jit():
    args, levels, _ = inputs()

    def call(levels):
        return cascade_attention(*args, levels, validate_values=True)

    checked = jax.jit(checkify.checkify(call))
    assert checked(levels)[0].get() is None
    table, indptr = levels[2]
    levels[2] = dataclasses.replace(table, kv_lens=table.kv_lens.at[0].set(1)), indptr
    assert "levels[2][0].kv_lens: expected at least each row's query tokens" in checked(levels)[0].get()
