"""Finding tokens whose slot a later token has: tiles leave in any order, and the last of equals must win.

A thread block brings the slots of all tokens from its own first one on into shared memory, once, and its
warpgroups look through them for each tile. Neighbouring tokens mostly go to one page or two, and later tokens
elsewhere: so a first look only asks whether any later slot lies in one of two ranges that hold the tile's
own. Where one does, each own slot is compared with each later one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import ceil_div, div, rem, round_up
from .layouts import NUM_WARPS, along_columns, along_rows, full
from .token_rows import Registers

i32 = jnp.int32
LEAST, LARGEST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
# Slots that a warpgroup looks at together: a row a warp, and 16 bytes a thread.
WINDOW = Registers(warp_rows=1, vector=4)
COLUMNS = WINDOW.columns
WINDOW_SLOTS = WINDOW.rows * COLUMNS
COPY_ROWS = 32  # of one copy at most: four of 16 KB bring 16384 slots


@dataclasses.dataclass(frozen=True)
class EqualSlots:
    """The comparison of a tile's slots with later ones.

    Attributes
    ----------
    num_tokens : int
        Slots there are.
    start, end : int
        Which of them the launch looks at.
    tile_tokens : int
        Tokens of a tile: a power of two that divides `COLUMNS`.
    warpgroups : int
        Warpgroups of a block.
    """

    num_tokens: int
    start: int
    end: int
    tile_tokens: int
    warpgroups: int

    @property
    def copy_rows(self) -> int:
        """Rows of slots that come in one copy; one by one where the array is not made of whole rows."""
        if self.num_tokens % COLUMNS or self.start % COLUMNS:
            return 1
        return min(COPY_ROWS, round_up(ceil_div(self.end - self.start, COLUMNS), WINDOW.rows))

    @property
    def copies(self) -> int:
        return ceil_div(self.end - self.start, self.copy_rows * COLUMNS)

    def scratch(self) -> dict[str, Any]:
        """What the warpgroups share."""
        rows = round_up(self.copies * self.copy_rows, WINDOW.rows)
        return {
            "slots_smem": plgpu.SMEM((rows, COLUMNS), i32),
            "slots_ready": plgpu.Barrier(num_arrivals=self.copies),
        }

    def warpgroup_scratch(self) -> dict[str, Any]:
        """What each warpgroup has for itself, at its index."""
        return {"found_smem": plgpu.SMEM((self.warpgroups, 2, NUM_WARPS), i32)}

    def operand(self, slots: jax.Array) -> jax.Array:
        """The slots as `fetch` takes them."""
        return slots if self.copy_rows == 1 else slots.reshape(-1, COLUMNS)

    def fetch(self, slots_gmem: Any, first_token: Any, warpgroup: Any, refs: dict[str, Any]) -> None:
        """Begin to bring this warpgroup's share of the slots from `first_token` on."""
        needed = div(first_token - self.start, self.copy_rows * COLUMNS)

        def fetch(turn, _):
            copy = turn.astype(i32) * self.warpgroups + warpgroup

            # Past the end of the array come zeros, which don't count.
            @pl.when((copy >= needed) & (copy < self.copies))
            def _():
                if self.copy_rows == 1:
                    source, target = pl.ds(self.start + copy * COLUMNS, COLUMNS), copy
                else:
                    first = copy * self.copy_rows
                    source = pl.ds(self.start // COLUMNS + first, self.copy_rows)
                    target = pl.ds(first, self.copy_rows)
                plgpu.copy_gmem_to_smem(
                    slots_gmem.at[source], refs["slots_smem"].at[target], refs["slots_ready"]
                )

            @pl.when(copy < needed)
            def _():
                plgpu.barrier_arrive(refs["slots_ready"])

        lax.fori_loop(0, ceil_div(self.copies, self.warpgroups), fetch, None)

    def slot(self, first_token: Any, token: Any, refs: dict[str, Any]) -> Any:
        """The slot of one of the tokens of the tile that begins with `first_token`."""
        first = first_token - self.start
        return refs["slots_smem"][div(first, COLUMNS), rem(first, COLUMNS) + token]

    def kept(self, first_token: Any, num_slots: int, refs: dict[str, Any]) -> Any:
        """Which tokens of a tile are to be written: bit t of the result says so of token t.

        Between two calls, warps have to meet at a commit_smem().
        """
        own, bits = [], i32(0)
        for token in range(self.tile_tokens):
            slot = self.slot(first_token, token, refs)
            valid = (slot >= 0) & (slot < num_slots) & (first_token + token < self.end)
            own.append(jnp.where(valid, slot, i32(-1)))
            bits |= jnp.where(valid, i32(1 << token), i32(0))
        for token, slot in enumerate(own):
            for later in own[token + 1 :]:
                bits = jnp.where(slot == later, bits & i32(~(1 << token)), bits)

        later = first_token + self.tile_tokens - self.start
        near = self._any_near(own, later, refs)
        return lax.cond(near, lambda: bits & ~self._equal(own, later, refs), lambda: bits)

    def _any_near(self, own: list[Any], first: Any, refs: dict[str, Any]) -> Any:
        """Whether a slot from `first` on lies in one of two ranges that hold all own slots."""
        low = functools.reduce(jnp.minimum, [jnp.where(slot < 0, i32(LARGEST), slot) for slot in own])
        high = functools.reduce(jnp.maximum, own)
        middle = low + lax.div(high - low, i32(2))
        low_end = functools.reduce(jnp.maximum, [jnp.where(slot <= middle, slot, low) for slot in own])
        high_begin = functools.reduce(jnp.minimum, [jnp.where(slot > middle, slot, high) for slot in own])
        ranges = ((low, low_end), (high_begin, high))

        # Less `begin`, and in the order of unsigned integers, a slot is at most `end - begin` in the range
        # alone. Added to the least integer, these are in the order of signed ones.
        def look(later, nearest):
            return tuple(
                jnp.minimum(least, later + (i32(LEAST) - begin))
                for least, (begin, _) in zip(nearest, ranges, strict=True)
            )

        furthest = full((WINDOW.rows, COLUMNS), LARGEST, WINDOW.layout, i32)
        nearest = self._over_later(first, look, (furthest, furthest), refs)
        within = [
            least <= i32(LEAST) + (end - begin) for least, (begin, end) in zip(nearest, ranges, strict=True)
        ]
        near = jnp.where(within[0] | within[1], i32(1), i32(0))
        return (high >= 0) & (_any_bits(near, 1, refs["found_smem"].at[0]) > 0)

    def _equal(self, own: list[Any], first: Any, refs: dict[str, Any]) -> Any:
        """Which own slots are those of some token from `first` on, as bits."""

        def compare(later, equal):
            for token, slot in enumerate(own):
                equal = jnp.where(later == slot, equal | i32(1 << token), equal)
            return equal

        none = full((WINDOW.rows, COLUMNS), 0, WINDOW.layout, i32)
        equal = self._over_later(first, compare, none, refs)
        return _any_bits(equal, len(own), refs["found_smem"].at[1])

    def _over_later(self, first: Any, body: Callable[[Any, Any], Any], carry: Any, refs: dict[str, Any]):
        """Run `carry = body(slots, carry)` over windows of the slots from `first` on, -1 in others' place."""
        count = self.end - self.start
        shape, layout = (WINDOW.rows, COLUMNS), WINDOW.layout

        def step(window, carry, *, whole=True):
            at = pl.ds(window * WINDOW.rows, WINDOW.rows)
            slots = plgpu.load(refs["slots_smem"].at[at], layout=layout, optimized=False)
            if not whole:
                rows = plgpu.broadcasted_iota(i32, shape[:1], 0, layout=layout.reduce(1))
                columns = plgpu.broadcasted_iota(i32, shape[1:], 0, layout=layout.reduce(0))
                index = along_columns(rows * COLUMNS + window * WINDOW_SLOTS, shape)
                index = index + along_rows(columns, shape)
                slots = jnp.where((index >= first) & (index < count), slots, i32(-1))
            return body(slots, carry)

        windows, whole_windows = ceil_div(count, WINDOW_SLOTS), count // WINDOW_SLOTS
        begin = jnp.minimum(div(first, WINDOW_SLOTS), windows - 1)
        carry = step(begin, carry, whole=False)
        if whole_windows > 1:
            carry = lax.fori_loop(begin + 1, whole_windows, step, carry)
        if windows > max(whole_windows, 1):
            carry = step(windows - 1, carry, whole=False)
        return carry


def _any_bits(x: Any, count: int, found_smem: Any) -> Any:
    """The first `count` bits that any value of [rows, columns] has, as a scalar.

    Not by a reduction across warps, for which all warpgroups have the same memory (jax 0.11.2, 0.12.0).
    """
    bits = [(x & i32(1 << bit)).max(axis=1) for bit in range(count)]
    found_smem[...] = functools.reduce(jnp.bitwise_or, bits)
    plgpu.commit_smem()
    return functools.reduce(jnp.bitwise_or, [found_smem[warp] for warp in range(NUM_WARPS)])
