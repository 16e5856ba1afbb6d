"""Finding tokens whose slot a later token has: blocks write in any order, and the last of equals must win.

Each block compares the slots of its own tokens with those of all later ones. That is quadratic, but in
registers, beside the copies of other blocks, and waits for no other launch.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .integers import ceil_div, div, rem, round_up
from .layouts import along_columns, along_rows, full

i32 = jnp.int32
THREADS = 128
COPY_SLOTS = 256  # of one copy at most
MAX_CHUNK = 1024
STAGES = 2

# Of [later tokens, own tokens] in registers: a thread has one later token and all own ones.
PAIRS = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 1), (32, 1))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1
)


@dataclasses.dataclass(frozen=True)
class EqualSlots:
    """The comparison of a block's slots with later ones, a chunk at a time.

    Attributes
    ----------
    num_tokens : int
        Slots there are.
    start, end : int
        Which of them the launch looks at; `start` is a multiple of `block_tokens`.
    block_tokens : int
        Tokens of a block: a power of two.
    """

    num_tokens: int
    start: int
    end: int
    block_tokens: int

    @property
    def chunk(self) -> int:
        """Slots that come together."""
        return min(MAX_CHUNK, round_up(self.end - self.start, COPY_SLOTS))

    def scratch(self) -> dict[str, Any]:
        return {
            "slots_smem": plgpu.SMEM((STAGES, self.chunk), i32),
            "slots_ready": plgpu.Barrier(num_barriers=STAGES, num_arrivals=self.chunk // COPY_SLOTS),
            "kept_smem": plgpu.SMEM((self.block_tokens,), i32),
        }

    def fetch_first(self, slots_gmem: Any, first_token: Any, refs: dict[str, Any]) -> None:
        """Begin to fetch the chunk with the block's own slots and the one after it."""
        chunk = div(first_token - self.start, self.chunk)
        for stage in range(STAGES):
            self._fetch(slots_gmem, chunk + stage, i32(stage), refs)

    def _fetch(self, slots_gmem: Any, chunk: Any, stage: Any, refs: dict[str, Any]) -> None:
        first = self.start + chunk * self.chunk

        @pl.when(first < self.end)
        def _():
            for i in range(self.chunk // COPY_SLOTS):
                # Past the last slots these come again; their place in the chunk says that they don't count.
                last = self.start + (self.num_tokens - 1 - self.start) // COPY_SLOTS * COPY_SLOTS
                start = jnp.minimum(first + i * COPY_SLOTS, last)
                plgpu.copy_gmem_to_smem(
                    slots_gmem.at[pl.ds(start, COPY_SLOTS)],
                    refs["slots_smem"].at[stage, pl.ds(i * COPY_SLOTS, COPY_SLOTS)],
                    refs["slots_ready"].at[stage],
                )

    def keep_last(self, slots_gmem: Any, first_token: Any, num_slots: int, refs: dict[str, Any]) -> None:
        """Put the block's slots into "kept_smem", -1 for what is not to be written."""
        own_tokens = self.block_tokens
        slots_smem, shape = refs["slots_smem"], (THREADS, own_tokens)
        first_chunk = div(first_token - self.start, self.chunk)
        chunks = ceil_div(self.end - self.start, self.chunk)
        plgpu.barrier_wait(refs["slots_ready"].at[0])
        own_at = pl.ds(rem(first_token - self.start, self.chunk), own_tokens)
        own = plgpu.load(slots_smem.at[0, own_at], layout=PAIRS.reduce(0), optimized=False)
        own_index = first_token + plgpu.broadcasted_iota(i32, (own_tokens,), 0, layout=PAIRS.reduce(0))

        def compare(chunk, stage, equal, own_chunk):
            for i in range(self.chunk // THREADS):
                at = pl.ds(i * THREADS, THREADS)
                later = plgpu.load(slots_smem.at[stage, at], layout=PAIRS.reduce(1), optimized=False)
                index = plgpu.broadcasted_iota(i32, (THREADS,), 0, layout=PAIRS.reduce(1))
                index = index + (self.start + chunk * self.chunk + i * THREADS)
                later = jnp.where(index < self.end, later, i32(-1))
                same = along_columns(later, shape) == along_rows(own, shape)
                if own_chunk:
                    same &= along_columns(index, shape) > along_rows(own_index, shape)
                equal = jnp.where(same, full(shape, 1, PAIRS, i32), equal)
            return equal

        def compare_later(chunk, equal):
            turn = chunk - first_chunk
            stage = rem(turn, STAGES)
            plgpu.barrier_wait(refs["slots_ready"].at[stage])
            equal = compare(chunk, stage, equal, False)
            plgpu.commit_smem()  # everyone has read the stage
            self._fetch(slots_gmem, chunk + STAGES, stage, refs)
            return equal

        equal = compare(first_chunk, i32(0), full(shape, 0, PAIRS, i32), True)
        plgpu.commit_smem()
        self._fetch(slots_gmem, first_chunk + STAGES, i32(0), refs)
        equal = lax.fori_loop(first_chunk + 1, chunks, compare_later, equal)
        dropped = (equal.max(axis=0) > 0) | (own >= num_slots) | (own_index >= self.end)
        refs["kept_smem"][...] = jnp.where(dropped, i32(-1), own)
