"""The batch's rows as the decode kernel sees them: clipped, counted and found as by a plain-Python twin."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn import testing
from jax_paged_attn.kernels.mosaic_gpu.rows import BatchRows, Table, VectorRows
from jax_paged_attn.kernels.mosaic_gpu.tiling import Tiling
from jax_paged_attn.kernels.mosaic_gpu.window import Window

i32 = jnp.int32
NUM_ENTRIES = 40
HOSTILE = np.array([-(2**31), -1, 0, 2**31 - 1], np.int32)


def clip(x, low, high):
    return max(low, min(x, high))


class RowsByHand:
    def __init__(self, table: Table, tiling: Tiling, window_left: int | None = None):
        self.tiling = tiling
        kv_lens = np.asarray(table.kv_lens).tolist()
        if table.indices is None:  # a row is a page
            num_entries, row_starts, row_pages = 2**31, range(table.first_row, 2**31), [1] * len(kv_lens)
            row_starts = row_starts[: len(kv_lens)]
        else:
            num_entries = len(table.indices)
            row_starts, row_pages = (np.asarray(x).tolist() for x in (table.row_starts, table.row_pages))
        kv_starts = [0] * len(kv_lens) if table.kv_starts is None else np.asarray(table.kv_starts).tolist()
        self.rows = []  # (row_start, kv_len, first tile, end tile)
        for at, pages, kv_len, start in zip(row_starts, row_pages, kv_lens, kv_starts, strict=True):
            at = clip(at, 0, num_entries)
            kv_len = clip(kv_len, 0, clip(pages, 0, num_entries - at) * tiling.page_size)
            last_key = max(kv_len - 1, 0)
            if window_left is not None and window_left >= 0:
                start = max(start, last_key - window_left)
            first, last = tiling.tile_of(clip(start, 0, last_key)), tiling.tile_of(last_key)
            self.rows.append((at, kv_len, first, last + 1))
        self.before = list(itertools.accumulate((row[3] - row[2] for row in self.rows), initial=0))
        self.total = self.before.pop()

    def find(self, tile):
        """(row, tiles before it); past the list's end, the last row."""
        row = max(row for row, before in enumerate(self.before) if before <= tile)
        return row, self.before[row]


def hostile_table(batch, page_size, has_kv_starts, contiguous=False):
    """Random rows, of which some have a start, page count, length or kv_start that makes no sense."""
    rng = np.random.default_rng((batch, page_size))

    def draw(low, high, size=batch):
        values = rng.integers(low, high, size, np.int32)
        return jnp.asarray(np.where(rng.random(size) < 0.2, rng.choice(HOSTILE, size), values))

    capacity = NUM_ENTRIES * page_size
    kv_starts = draw(0, capacity) if has_kv_starts else None
    if contiguous:
        return Table(draw(0, page_size + 5), kv_starts, first_row=7)
    indices = jnp.zeros(NUM_ENTRIES, i32)
    return Table(draw(0, capacity), kv_starts, indices, draw(0, NUM_ENTRIES), draw(0, NUM_ENTRIES))


@pytest.mark.newest
@pytest.mark.parametrize("page_size", [1, 12, 64, 100, 544])
@pytest.mark.parametrize("has_kv_starts", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("window_left", [None, 70])
def test_batch_rows(page_size, has_kv_starts, contiguous, window_left):
    batch, tiling = 29, Tiling.choose(page_size, 64, 128)
    table = hostile_table(batch, page_size, has_kv_starts, contiguous)
    by_hand = RowsByHand(table, tiling, window_left)
    b = jnp.arange(batch, dtype=i32)
    tiles = jnp.arange(by_hand.total + 1, dtype=i32)

    @jax.jit
    def read():
        rows = BatchRows(table, tiling, batch, Window(left=None if window_left is None else i32(window_left)))
        return jax.vmap(rows.row)(b), rows.total(), jax.vmap(rows.find)(tiles), rows.row(i32(batch))

    row, total, (found, before), past_the_batch = read()
    columns = (x.tolist() for x in (row.table_start, row.kv_len, row.first_tile, row.end_tile))
    assert list(zip(*columns, strict=True)) == by_hand.rows
    assert row.index.tolist() == b.tolist()
    assert int(total) == by_hand.total
    expected = [by_hand.find(tile) for tile in tiles.tolist()]
    assert list(zip(found.index.tolist(), before.tolist(), strict=True)) == expected
    last = jax.tree.map(lambda x: x[-1], row)
    chex.assert_trees_all_equal(past_the_batch, last._replace(index=i32(batch)))
    chex.assert_trees_all_equal(found, jax.tree.map(lambda x: x[found.index], row))


@pytest.mark.parametrize(
    ("batch", "has_kv_starts", "contiguous", "window_left"),
    [
        (33, False, False, None),
        pytest.param(33, True, False, None, marks=pytest.mark.newest),
        (128, True, False, -1),
        (129, False, False, 0),
        (300, True, False, 100),
        (40, False, True, None),
        (200, True, True, 2**31 - 1),
    ],
)
def test_vector_rows(batch, has_kv_starts, contiguous, window_left):
    page_size, parts, queries = 300 if contiguous else 12, 2, 8
    tiling = Tiling.choose(page_size, 64, 128)
    table = hostile_table(batch, page_size, has_kv_starts, contiguous)
    by_hand = RowsByHand(table, tiling, window_left)
    rng = np.random.default_rng(batch)
    some = rng.integers(0, by_hand.total, parts * queries - 4)
    tiles = np.array([0, 1, by_hand.total - 1, by_hand.total, *some], np.int32)

    def body(tiles_gmem, *args):
        table_gmem, (out_gmem, *scratch) = args[: len(fields)], args[len(fields) :]
        rows = VectorRows(
            table._replace(**dict(zip(fields, table_gmem, strict=True))),
            tiling,
            batch,
            *scratch,
            window=Window(left=None if window_left is None else i32(window_left)),
        )
        part = lax.axis_index("part")

        def answer(i, _):
            query = part * queries + i
            found, before = rows.find(tiles_gmem[query])
            row = (found.table_start, found.kv_len, found.first_tile, found.end_tile)
            for at, value in enumerate((rows.total(), before, found.index, *row)):
                out_gmem[query, at] = value

        lax.fori_loop(0, queries, answer, None)

    fields = table.arrays()
    answers = plgpu.kernel(
        body,
        grid=(parts,),
        grid_names=("part",),
        out_type=jax.ShapeDtypeStruct((parts * queries, 7), i32),
        scratch_types=VectorRows.scratch(batch, len(fields.keys() - {"indices"})),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if testing.interpreting("mosaic_gpu") else None,
    )(tiles, *fields.values())
    for tile, answer in zip(tiles.tolist(), answers.tolist(), strict=True):
        row, before = by_hand.find(tile)
        assert answer == [by_hand.total, before, row, *by_hand.rows[row]]


def test_a_longer_table_moves_no_tile():
    tiling = Tiling.choose(16, 64, 128)
    lens = jnp.array([0, 1, 64, 65, 300], i32)
    ranges = []
    for pages in (19, 400):
        table = Table(lens, None, jnp.zeros(5 * pages, i32), pages * jnp.arange(5), jnp.full(5, pages))
        row = jax.vmap(BatchRows(table, tiling, 5, Window()).row)(jnp.arange(5))
        ranges.append((row.first_tile.tolist(), row.end_tile.tolist()))
    assert ranges[0] == ranges[1] == ([0] * 5, [1, 1, 1, 2, 5])
