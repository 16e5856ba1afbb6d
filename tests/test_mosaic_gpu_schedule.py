"""The arithmetic of the decode kernel's schedule, without a kernel: against a plain-Python twin.

The twin deals the tiles out one part after another; the schedule computes each part's place on its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_paged_attn.kernels.mosaic_gpu.schedule import BalancedCuts, FixedCuts, Schedule

BLOCK_KV = 64
MAX_BATCH, MAX_PARTS, MAX_SPLITS = 300, 264, 16


class Piece(NamedTuple):
    """Tiles [begin, end) of `row`, walked by `part`."""

    part: int
    row: int
    begin: int
    end: int


class Row(NamedTuple):
    index: Any
    first_tile: Any
    end_tile: Any


class ArrayRows:
    """Rows of given tile ranges: arrays padded to MAX_BATCH, of which the first `batch` count."""

    def __init__(self, firsts, ends, batch):
        self.firsts, self.ends, self.batch = firsts, ends, batch
        counts = jnp.where(jnp.arange(MAX_BATCH) < batch, ends - firsts, 0)
        self.tiles_up_to = jnp.cumsum(counts, dtype=jnp.int32)

    def row(self, b):
        b = jnp.minimum(b, self.batch - 1)
        return Row(b, self.firsts[b], self.ends[b])

    def total(self):
        return self.tiles_up_to[-1]

    def find(self, tile):
        row = self.row(jnp.searchsorted(self.tiles_up_to, tile, side="right").astype(jnp.int32))
        return row, self.tiles_up_to[row.index] - (row.end_tile - row.first_tile)


# One compilation serves every batch and number of parts: in a kernel the parts are static, here they aren't.
@functools.partial(jax.jit, static_argnames=("cut", "max_parts"))
def all_runs(cut, firsts, ends, batch, parts, *, max_parts):
    cuts = cut(ArrayRows(firsts, ends, batch), parts)
    return jax.vmap(cuts.run)(jnp.arange(max_parts, dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames="cut")
def all_followers(cut, firsts, ends, batch, parts, owners):
    rows = ArrayRows(firsts, ends, batch)

    def followers(part, b, tiles_done):
        return cut(rows, parts).followers(part, rows.row(b), tiles_done)

    return jax.vmap(followers)(*owners)


def padded(values, size):
    return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, size - len(values))))


def as_device(ranges):
    firsts, ends = zip(*ranges, strict=True)
    return padded(firsts, MAX_BATCH), padded(ends, MAX_BATCH)


def walk(cut, ranges, parts, num_runs):
    """Walk the runs as the kernel does.

    Returns the pieces in the order of the walk, and {part: (followers, row)} of the rows that parts own.
    """
    max_parts = MAX_PARTS if cut is BalancedCuts else MAX_BATCH * MAX_SPLITS
    batch = np.int32(len(ranges))
    firsts, ends = as_device(ranges)
    parts = np.int32(parts)
    runs = all_runs(cut, firsts, ends, batch, parts, max_parts=max_parts)
    columns = (np.asarray(x)[:num_runs].tolist() for x in (runs.row.index, runs.first_tile, runs.num_tiles))
    pieces, owners = [], []
    for part, (row, begin, num_tiles) in enumerate(zip(*columns, strict=True)):
        left = num_tiles
        while left > 0:
            first, last = ranges[row]
            end = min(begin + left, last)
            pieces.append(Piece(part, row, begin, end))
            if begin == first and end < last:
                owners.append((part, row, num_tiles - left))
            left -= end - begin
            row, begin = row + 1, ranges[min(row + 1, len(ranges) - 1)][0]
    columns = tuple(padded([owner[i] for owner in owners], max_parts) for i in range(3))
    followers = np.asarray(all_followers(cut, firsts, ends, batch, parts, columns)).tolist()
    return pieces, {part: (followers[i], row) for i, (part, row, _) in enumerate(owners)}


def deal_equal_parts(ranges, parts):
    """The twin of BalancedCuts."""
    total = sum(end - first for first, end in ranges)
    pieces, row, tile = [], 0, ranges[0][0]
    for part in range(parts):
        left = total // parts + (1 if part < total % parts else 0)
        while left:
            taken = min(left, ranges[row][1] - tile)
            pieces.append(Piece(part, row, tile, tile + taken))
            left, tile = left - taken, tile + taken
            if tile == ranges[row][1] and row + 1 < len(ranges):
                row, tile = row + 1, ranges[row + 1][0]
    return pieces


def deal_each_row(ranges, splits):
    """The twin of FixedCuts."""
    pieces = []
    for row, (first, end) in enumerate(ranges):
        length = -(-end // splits)
        for split in range(splits):
            tiles = [t for t in range(split * length, min((split + 1) * length, end)) if t >= first]
            if tiles:
                pieces.append(Piece(row * splits + split, row, tiles[0], tiles[-1] + 1))
    return pieces


def check_every_tile_once(pieces, ranges):
    """Laid end to end, the pieces are the list of all tiles."""
    row, tile = 0, ranges[0][0]
    for piece in pieces:
        assert (piece.row, piece.begin) == (row, tile)
        assert piece.begin < piece.end <= ranges[row][1]
        tile = piece.end
        if tile == ranges[row][1]:
            row += 1
            tile = ranges[row][0] if row < len(ranges) else None
    assert row == len(ranges)


def check_merge(pieces, owners, ranges):
    """Merging by `owners` combines the pieces of each cut row, all of them once and in order."""
    slots = {}  # a part's slot 0 is for a row that began in an earlier part, 1 for one that a later part ends
    for piece in pieces:
        first, last = ranges[piece.row]
        if (piece.begin, piece.end) != (first, last):
            slot = (piece.part, 0 if piece.begin > first else 1)
            assert slot not in slots
            slots[slot] = piece
    for part, (followers, row) in owners.items():
        assert followers > 0
        merged = [slots.pop((part + i, 0 if i else 1)) for i in range(followers + 1)]
        tile = ranges[row][0]
        for piece in merged:
            assert (piece.row, piece.begin) == (row, tile)
            tile = piece.end
        assert tile == ranges[row][1]
    assert not slots


def check_balanced(ranges, parts):
    pieces, owners = walk(BalancedCuts, ranges, parts, parts)
    assert pieces == deal_equal_parts(ranges, parts)
    check_every_tile_once(pieces, ranges)
    check_merge(pieces, owners, ranges)
    sizes = [0] * parts
    for piece in pieces:
        sizes[piece.part] += piece.end - piece.begin
    assert max(sizes) - min(sizes) <= 1


def check_fixed(ranges, splits):
    pieces, owners = walk(FixedCuts, ranges, splits, len(ranges) * splits)
    assert pieces == deal_each_row(ranges, splits)
    check_every_tile_once(pieces, ranges)
    check_merge(pieces, owners, ranges)
    return pieces, owners


def tile_ranges(kv_lens, kv_starts):
    """[first, end) of each row; a row without keys has one tile."""
    return [
        (min(start, max(kv_len - 1, 0)) // BLOCK_KV, max(-(-kv_len // BLOCK_KV), 1))
        for kv_len, start in zip(kv_lens, kv_starts, strict=True)
    ]


def random_ranges(rng):
    """Batches of every size; equal, even, heavy-tailed and mostly empty lengths up to 100000."""
    batch = int(rng.integers(1, rng.choice([2, 4, 33, MAX_BATCH + 1])))
    longest = int(10 ** rng.uniform(0, 5))
    lens = [
        np.full(batch, longest),
        rng.integers(0, longest + 1, batch),
        np.clip(np.exp(rng.normal(5, 2, batch)), 0, 100_000).astype(int),
        np.where(rng.random(batch) < 0.1, longest, 0),
    ][rng.integers(4)]
    starts = rng.integers(0, lens + 2) if rng.random() < 0.5 else np.zeros(batch, int)
    return tile_ranges(lens.tolist(), starts.tolist())


@pytest.mark.newest
def test_balanced_cuts_of_random_batches():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        parts = (1, 2, 32, 132, MAX_PARTS, int(rng.integers(1, MAX_PARTS + 1)))
        check_balanced(random_ranges(rng), parts[rng.integers(len(parts))])


def test_fixed_cuts_of_random_batches():
    rng = np.random.default_rng(1)
    for _ in range(1000):
        check_fixed(random_ranges(rng), int(rng.integers(1, MAX_SPLITS + 1)))


rows = st.lists(
    st.tuples(st.integers(0, 100_000) | st.integers(0, 200), st.integers(0, 100_001) | st.just(0)),
    min_size=1,
    max_size=12,
)


@given(rows, st.integers(1, MAX_PARTS))
def test_balanced_cuts(rows, parts):
    check_balanced(tile_ranges(*zip(*rows, strict=True)), parts)


@given(rows, st.integers(1, MAX_SPLITS))
def test_fixed_cuts(rows, splits):
    check_fixed(tile_ranges(*zip(*rows, strict=True)), splits)


@given(st.data(), rows, st.integers(1, MAX_SPLITS))
def test_fixed_cuts_of_a_row_do_not_depend_on_its_batch_mates_or_place(data, rows, splits):
    ranges = tile_ranges(*zip(*rows, strict=True))
    row = data.draw(st.integers(0, len(ranges) - 1))

    def of_row(pieces, owners, row):
        in_row = [piece for piece in pieces if piece.row == row]
        followers = {part - row * splits: n for part, (n, b) in owners.items() if b == row}
        return [(piece.part - row * splits, piece.begin, piece.end) for piece in in_row], followers

    assert of_row(*check_fixed(ranges, splits), row) == of_row(*check_fixed([ranges[row]], splits), 0)


def test_more_parts_than_tiles():
    pieces, owners = walk(BalancedCuts, [(0, 1), (4, 6)], MAX_PARTS, MAX_PARTS)
    assert pieces == [Piece(0, 0, 0, 1), Piece(1, 1, 4, 5), Piece(2, 1, 5, 6)]
    assert owners == {1: (1, 1)}


def test_schedule_chooses_the_cuts():
    rows = ArrayRows(*as_device([(0, 3), (1, 2)]), 2)
    balanced, fixed = Schedule.balanced(2, 5), Schedule.fixed(2, 3)
    assert (balanced.parts, fixed.parts) == (5, 6)
    assert isinstance(balanced.cuts(rows), BalancedCuts)
    assert isinstance(fixed.cuts(rows), FixedCuts)
