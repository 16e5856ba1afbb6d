"""The heads of a tile's tokens as rows of shared memory: how they come, are rotated and rounded."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged_attn.quantize import stored

from .integers import round_up
from .layouts import LANES, NUM_WARPS, along_columns, along_rows, f32
from .shared_tile import SharedTile

COPY_ROWS = 256  # rows of one copy at most
SMEM_ALIGNMENT = 128  # bytes, of where a copy begins in shared memory
BANKS, BANK_BYTES = 32, 4


@dataclasses.dataclass(frozen=True)
class Registers:
    """How [rows, columns] lie in registers: a warp has `warp_rows` rows, a lane `vector` neighbours of one.

    Mosaic GPU stores to shared memory from no layout that makes lanes wait for a bank.
    """

    warp_rows: int
    vector: int

    @classmethod
    def choose(cls, columns: int, row_bytes: int, itemsize: int) -> "Registers | None":
        """The widest that fits `columns` and stores rows `row_bytes` apart without bank conflicts, if any."""
        for warp_rows in (1, 2, 4):
            for vector in (4, 2, 1):
                self = cls(warp_rows, vector)
                if columns % self.columns == 0 and not self._conflicts(row_bytes, itemsize):
                    return self
        return None

    @property
    def rows(self) -> int:
        """Rows that it holds a multiple of."""
        return NUM_WARPS * self.warp_rows

    @property
    def columns(self) -> int:
        """Columns that it holds a multiple of."""
        return LANES // self.warp_rows * self.vector

    @property
    def layout(self) -> Any:
        if self.warp_rows == 1:
            tiles, dims = ((NUM_WARPS, self.columns), (self.vector,)), ((-3,), (-2,))
        else:
            tiles = ((self.rows, self.columns), (self.warp_rows, self.columns), (self.vector,))
            dims = ((-5,), (-3, -2))
        warp_dims, lane_dims = dims
        return plgpu.Layout.TILED(
            plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1
        )

    def _conflicts(self, row_bytes: int, itemsize: int) -> bool:
        lane_bytes = self.vector * itemsize
        lanes_a_row = LANES // self.warp_rows
        at_once = LANES // max(lane_bytes // BANK_BYTES, 1)  # lanes that are served together
        for first in range(0, LANES, at_once):
            starts = (
                lane // lanes_a_row * row_bytes + lane % lanes_a_row * lane_bytes
                for lane in range(first, first + at_once)
            )
            words = {(start + byte) // BANK_BYTES for start in starts for byte in range(lane_bytes)}
            if len({word % BANKS for word in words}) != len(words):
                return True
        return False


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """How the heads of a tile's tokens lie in shared memory: rows, each token's from a multiple of `pitch`.

    Attributes
    ----------
    tokens, heads, columns : int
        Tokens of a tile, heads of each, and their head_dim.
    pitch : int
        Rows from one token to the next.
    width : int
        Columns that slices of a row begin and end at multiples of.
    """

    tokens: int
    heads: int
    columns: int
    pitch: int
    width: int

    @classmethod
    def choose(cls, tokens: int, heads: int, slices: tuple[int, ...], itemsize: int) -> "TokenRows":
        """Lay rows out.

        Parameters
        ----------
        tokens, heads : int
            As above.
        slices : tuple[int, ...]
            Columns of each slice of a row that goes through registers by itself.
        itemsize : int
            Bytes of the smallest value that is stored so.
        """
        columns = sum(slices)
        aligned = heads * columns * itemsize % SMEM_ALIGNMENT == 0
        step = SMEM_ALIGNMENT // math.gcd(columns * itemsize, SMEM_ALIGNMENT)
        return cls(tokens, heads, columns, heads if aligned else round_up(heads, step), math.gcd(*slices))

    def padded(self, step: int) -> "TokenRows":
        """The same with tokens that begin at multiples of `step` rows."""
        return dataclasses.replace(self, pitch=round_up(self.pitch, step))

    def scratch(self, warpgroups: int, dtype: Any) -> Any:
        """Shared memory for a tile of each warpgroup."""
        tile = SharedTile.choose(dtype, self.columns, self.width)
        return tile.scratch(warpgroups, self.tokens * self.pitch)

    def of(self, smem: Any, token: Any, first_column: int = 0, columns: int | None = None) -> Any:
        """A token's rows, padding included, or a slice of their columns."""
        columns = self.columns if columns is None else columns
        at = pl.ds(first_column, columns) if columns != self.columns else slice(None)
        return smem.at[pl.ds(token * self.pitch, self.pitch), at]

    @property
    def tokens_per_copy(self) -> int:
        """Tokens that one copy to or from a flat array [num_tokens * heads, columns] brings."""
        if self.pitch != self.heads:
            return 1
        return min(self.tokens, 1 << (COPY_ROWS // self.heads).bit_length() - 1)

    @property
    def copies(self) -> int:
        return self.tokens // self.tokens_per_copy

    def _copies(self, gmem: Any, smem: Any, first_token: Any):
        count = self.tokens_per_copy * self.heads
        for copy in range(self.copies):
            token = first_token + copy * self.tokens_per_copy
            part = smem.at[pl.ds(copy * self.tokens_per_copy * self.pitch, count)]
            yield token, part, lambda token: gmem.at[pl.ds(token * self.heads, count)]

    def load(self, gmem: Any, smem: Any, first_token: Any, num_tokens: int, ready: Any) -> None:
        """Begin to copy a tile's tokens from [num_tokens * heads, columns]."""
        for token, part, rows_of in self._copies(gmem, smem, first_token):
            # Past the end the last token comes again, and what lies past the array reads as 0.
            plgpu.copy_gmem_to_smem(rows_of(jnp.minimum(token, num_tokens - 1)), part, ready)

    def store(self, smem: Any, gmem: Any, first_token: Any, num_tokens: int) -> None:
        """Begin to copy a tile's tokens to [num_tokens * heads, columns]; what lies past it is dropped."""
        for token, part, rows_of in self._copies(gmem, smem, first_token):

            @pl.when(token < num_tokens)
            def _(token=token, part=part, rows_of=rows_of):
                plgpu.copy_smem_to_gmem(part, rows_of(token), commit_group=False)


def convert(x: Any, scale: Any, dtype: Any) -> Any:
    """Round [rows, columns] to a pool's dtype; `scale` is None, a scalar or [rows]."""
    if scale is not None and scale.ndim == 1:
        scale = along_columns(scale, x.shape)
    return stored(x, scale, dtype)


def rotate_halves(
    rows: TokenRows,
    registers: Registers,
    source: Any,
    target: Any,
    token: Any,
    cos_sin: Callable[[Any], list[Any]],
    half: int,
    scale_of: Callable[[Any], Any],
) -> None:
    """Rotate a token's rows of `source`, columns i with i + half, and round them into `target`."""
    layout = registers.layout
    a, b = (
        plgpu.load(rows.of(source, token, first, half), layout=layout, optimized=False).astype(f32)
        for first in (0, half)
    )
    cos, sin = (along_rows(x, a.shape) for x in cos_sin(layout.reduce(0)))
    scale = scale_of(layout.reduce(1))
    for first, rotated in ((0, a * cos - b * sin), (half, b * cos + a * sin)):
        rows.of(target, token, first, half)[...] = convert(rotated, scale, target.dtype)


def convert_columns(
    rows: TokenRows,
    registers: Registers,
    source: Any,
    target: Any,
    token: Any,
    first: int,
    scale_of: Callable[[Any], Any],
) -> None:
    """Round a token's rows of `source`, from column `first` on, into `target`."""
    columns = rows.columns - first
    x = plgpu.load(rows.of(source, token, first, columns), layout=registers.layout, optimized=False)
    scale = scale_of(registers.layout.reduce(1))
    rows.of(target, token, first, columns)[...] = convert(x, scale, target.dtype)
