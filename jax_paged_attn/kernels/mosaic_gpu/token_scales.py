"""Scales of tokens on their way to shared memory: each thread fetches those of its keys.

Beside a tile of K and V they are few bytes, a page or a token apart. A copy by the tensor memory
accelerator would cost as much as that of the page itself, and can't move the single values of the layout NHD.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from .inline import address, asm, i32, int32, int64, read_only
from .layouts import THREADS
from .tiling import Tiling

MIN_SCALE, MAX_SCALE = 2.0**-84, 2.0**110


@dataclasses.dataclass(frozen=True)
class TokenScales:
    """How the scales of a tile's keys are found.

    Attributes
    ----------
    tiling : Tiling
        How keys fall into tiles.
    pool : tuple[int, int, int]
        Shape of the pool of scales.
    token_axis : int
        Which of its axes is the token in a page.
    interpret : bool
    """

    tiling: Tiling
    pool: tuple[int, int, int]
    token_axis: int
    interpret: bool

    @property
    def _token_step(self) -> int:
        """How far apart the scales of two tokens of a page lie."""
        return math.prod(self.pool[self.token_axis + 1 :])

    @property
    def _count(self) -> int:
        return math.prod(self.pool)

    def _first(self, block: tuple[Any, ...]) -> Any:
        """Where the scales of a block of a page begin in the flat pool."""
        at = list(block[:3])
        at[self.token_axis] = at[self.token_axis] * self.tiling.copy_rows
        _, second, third = self.pool
        return (at[0] * second + at[1]) * third + at[2]

    def fetch(self, blocks: list[tuple[Any, ...]], source: Any, target: Any) -> None:
        """Begin to bring the scales of a tile.

        Parameters
        ----------
        blocks : list
            Indices of the blocks of the cache that the tile's copies bring.
        source : ref
            The flat pool of scales.
        target : ref
            [block_kv]; what rows get that are no keys means nothing, and may be NaN.
        """
        firsts = [self._first(block) for block in blocks]
        if self.interpret:
            scales, step = source[...], self._token_step
            for copy, first in enumerate(firsts):
                at = first + jnp.arange(self.tiling.copy_rows, dtype=jnp.int32) * step
                rows = slice(copy * self.tiling.pitch, copy * self.tiling.pitch + self.tiling.copy_rows)
                target[rows] = scales[jnp.clip(at, 0, self._count - 1)]
            return
        scalar = plgpu.Layout.WG_SPLAT(())
        plgpu.inline_mgpu(arg_types=(read_only(), plgpu.RefType(), *[scalar] * len(firsts)))(
            lambda _, source, target, *firsts: self._fetch(
                source, target, [x.registers.item() for x in firsts]
            )
        )(source, target, *firsts)

    def _fetch(self, source: ir.Value, target: ir.Value, firsts: list[ir.Value]) -> None:
        """Thread t fetches the scales of rows t, t + 128, .. of the tile."""
        thread = arith.remui(utils.thread_idx(), i32(THREADS))
        source = address(source, int64())
        target = address(target, int32())
        tiling = self.tiling
        for start in range(0, tiling.block_kv, THREADS):
            # Where there are more threads than rows, several fetch the last one.
            row = arith.minui(arith.addi(thread, i32(start)), i32(tiling.block_kv - 1))
            copy, token = (op(row, i32(tiling.pitch)) for op in (arith.divui, arith.remui))
            token = arith.muli(arith.minui(token, i32(tiling.copy_rows - 1)), i32(self._token_step))
            to = arith.addi(target, arith.muli(row, i32(4)))
            # One copy after another: to choose among them first would keep all in registers.
            for i, first in enumerate(firsts):
                at = arith.addi(first, token)
                if tiling.page_size % tiling.copy_rows:  # the last page's last block reaches past the pool
                    at = arith.minui(at, i32(self._count - 1))
                asm(
                    [],
                    "{.reg .pred mine; .reg .b64 from; setp.eq.s32 mine, $0, $1;"
                    " mad.wide.u32 from, $2, 4, $3; @mine cp.async.ca.shared.global [$4], [from], 4;}",
                    "r,r,r,l,r,~{memory}",
                    [copy, i32(i), at, source, to],
                    has_side_effects=True,
                )

    def wait(self) -> None:
        """Wait for what this thread began to fetch; a barrier then makes it visible to the others."""
        if not self.interpret:
            plgpu.inline_mgpu()(
                lambda _: asm([], "cp.async.wait_all;", "~{memory}", [], has_side_effects=True)
            )()


def value_bias(scales: jax.Array) -> jax.Array:
    """Log2 of what values weigh beside others, so that weights times scales stay within float16.

    Held within bounds: above scales of 0, so that sums of weights stay finite, and where weights stay normal.
    """
    return jnp.log2(jnp.clip(jnp.abs(scales), MIN_SCALE, MAX_SCALE))
