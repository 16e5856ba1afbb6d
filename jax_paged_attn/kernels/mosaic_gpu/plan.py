"""The static side of a launch: the configuration, and what follows from it and from the problem."""

import dataclasses
import math

import numpy as np

from jax_paged_attn.calls.attention import Problem
from jax_paged_attn.validation import check, check_positive_int

from .byte_operands import ByteOperands
from .integers import ceil_div, round_up
from .layouts import MMA_COLUMNS, MMA_DEPTH, MMA_ROWS, PIECE_ROWS
from .operands import Operands
from .schedule import Schedule, pieces_per_row
from .shared_tile import SharedTile
from .tiling import Tiling
from .wide_operands import WideOperands
from .window import Window

MAX_TILE_HEADS = 16  # query heads of a tile
# With `wgmma`, by the columns of K or V, whichever are more.
MAX_WIDE_TILE_HEADS = {64: 72, 128: 72, 192: 56, 256: 32, 384: 24, 512: 16}
MAX_MODIFIED_TILE_HEADS = {64: 64, 128: 48, 192: 40, 256: 32}  # with modifiers or several tokens' queries
MAX_COLUMNS_OF_BYTES = 384  # of K and V together: with more, tiles of 1-byte values have half as many heads
# Up to here a loop over the lengths finds a part's place as fast as vector sums do (H200: 1 us faster at 8
# rows, 1 us slower at 64).
MAX_SCALAR_ROWS = 32
MAX_ROWS = 512  # rows of one launch whose lengths lie in shared memory
MAX_PARTS = 65535  # the second axis of a CUDA grid
MAX_BLOCK_KV = 256
MAX_PAGES = 252  # of a tile: a copy brings 256 table entries, and begins up to 3 before the first
MAX_MERGE_BLOCKS = 264  # 2 a multiprocessor of an H200


@dataclasses.dataclass(frozen=True)
class Config:
    """How the decode kernel cuts its work.

    Attributes
    ----------
    block_kv : int
        Keys of a tile, a multiple of 64.
    num_stages : int
        Tiles of K and V in flight in a thread block.
    num_parts : int
        Parts that the batch's tiles are cut into, for each kv head. Unused with `num_splits`.
    """

    block_kv: int = 64
    num_stages: int = 1
    num_parts: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_positive_int(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, int(getattr(self, field.name)))  # of numpy's integers
        expected = f"a multiple of {MMA_ROWS} up to {MAX_BLOCK_KV}"
        fits = self.block_kv % MMA_ROWS == 0 and self.block_kv <= MAX_BLOCK_KV
        check(fits, "block_kv", expected, repr(self.block_kv))
        check(self.num_parts <= MAX_PARTS, "num_parts", f"at most {MAX_PARTS}", repr(self.num_parts))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every static quantity of a launch, derived from the problem and the configuration."""

    problem: Problem
    config: Config

    def __post_init__(self):
        fits = self.problem.contiguous or self.tiling.pages_per_tile <= MAX_PAGES
        check(fits, "config", f"a block_kv of at most {MAX_PAGES} pages", repr(self.config))

    @property
    def tiling(self) -> Tiling:
        row_bytes = math.gcd(self.k_columns, self.v_columns) * self.problem.k_dtype.itemsize
        return Tiling.choose(self.problem.page_size, self.config.block_kv, row_bytes)

    @property
    def quantized(self) -> bool:
        """Whether the cache is of 1-byte values, which get to the matrix unit as float16."""
        return self.problem.k_dtype.itemsize == 1

    @property
    def operand_dtype(self) -> np.dtype:
        """What the matrix unit multiplies."""
        return np.dtype(np.float16) if self.quantized else self.problem.dtype

    @property
    def k_tile(self) -> SharedTile:
        """Rows of K in shared memory."""
        p = self.problem
        return SharedTile.choose(p.k_dtype, self.k_columns, p.head_dim, swizzled=self.tiling.swizzled)

    @property
    def v_tile(self) -> SharedTile:
        """Rows of V in shared memory."""
        p = self.problem
        return SharedTile.choose(p.v_dtype, self.v_columns, p.v_head_dim, swizzled=self.tiling.swizzled)

    @property
    def q_tile(self) -> SharedTile:
        """Query heads in shared memory."""
        p = self.problem
        return SharedTile.choose(p.dtype, self.k_columns, p.head_dim, swizzled=self.wide)

    @property
    def p_tile(self) -> SharedTile:
        """Weights of a head in shared memory, for `wgmma`."""
        block_kv = self.config.block_kv
        return SharedTile.choose(self.operand_dtype, block_kv, block_kv, swizzled=True)

    @property
    def token_scaled(self) -> tuple[str, ...]:
        """Which of "k_scale" and "v_scale" belong to tokens."""
        kinds = {"k_scale": self.problem.k_scale, "v_scale": self.problem.v_scale}
        return tuple(name for name, kind in kinds.items() if kind == "token")

    @property
    def head_values(self) -> tuple[str, ...]:
        """Modifiers that each query head has its own of."""
        return tuple(name for name in ("alibi_slopes", "sinks") if name in self.problem.given)

    def out_tile(self, columns: int) -> SharedTile:
        """Output rows, or slices of them, in shared memory."""
        return SharedTile.choose(self.problem.dtype, columns, self.problem.v_head_dim)

    def operands(self, *, interpret: bool) -> Operands:
        """How the decode kernel multiplies."""
        if self.wide:
            out = self.out_tile(self.v_columns)
            return WideOperands(self.operand_dtype, interpret, self.q_tile, self.p_tile, out)
        return self.merge_operands(interpret=interpret)

    def merge_operands(self, *, interpret: bool) -> Operands:
        """How the merge gets its output to memory."""
        if self.quantized:
            return ByteOperands(self.operand_dtype, interpret, self.q_tile, self.k_tile, self.v_tile)
        return Operands(self.operand_dtype, interpret)

    @property
    def group_size(self) -> int:
        """Queries of a kv head: its query heads, for each of a row's query tokens."""
        return self.problem.q_len * self.problem.group_size

    @property
    def num_q_heads(self) -> int:
        """Queries of all kv heads."""
        return self.problem.num_kv_heads * self.group_size

    @property
    def window(self) -> Window:
        """What queries see, but for the width of a traced window."""
        return Window(self.problem.q_len, self.problem.mask_len, self.problem.causal)

    @property
    def wide(self) -> bool:
        """Whether operands stay in shared memory, as it suits `wgmma`.

        Of a group that has too many query heads for registers, or of values that are also keys.
        """
        p = self.problem
        swizzles = all(dim % MMA_ROWS == 0 for dim in (p.head_dim, p.v_head_dim)) and self.tiling.swizzled
        one_instruction = self.config.block_kv == MMA_ROWS
        asked_for = self.group_size > MAX_TILE_HEADS or p.values_in_keys
        return asked_for and not self.quantized and swizzles and one_instruction

    @property
    def head_groups(self) -> int:
        """Tiles that a kv head's query heads take; each reads the cache again, mostly from L2."""
        return ceil_div(self.group_size, self.max_tile_heads)

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile, padded to the matrix unit's step."""
        return round_up(ceil_div(self.group_size, self.head_groups), MMA_COLUMNS)

    @property
    def max_tile_heads(self) -> int:
        """More query heads than these do not leave registers for all that a thread holds."""
        if self.wide:
            modified = self.window.differs or {*self.problem.given} - {"kv_starts"}
            most = MAX_MODIFIED_TILE_HEADS if modified else MAX_WIDE_TILE_HEADS
            # Of values in keys, those columns of keys that are none come last, and cost nothing.
            return most[
                self.v_columns if self.problem.values_in_keys else max(self.k_columns, self.v_columns)
            ]
        many_columns = self.k_columns + self.v_columns > MAX_COLUMNS_OF_BYTES
        return MAX_TILE_HEADS // 2 if self.quantized and many_columns else MAX_TILE_HEADS

    @property
    def heads(self) -> int:
        """The grid's second axis: (kv head, tile of query heads)."""
        return self.problem.num_kv_heads * self.head_groups

    @property
    def k_columns(self) -> int:
        """head_dim in shared memory, where q . k sums over it."""
        return round_up(self.problem.head_dim, MMA_DEPTH)

    @property
    def v_columns(self) -> int:
        """v's head_dim in shared memory, where it is the long side of P V."""
        return round_up(self.problem.v_head_dim, MMA_ROWS)

    @property
    def schedule(self) -> Schedule:
        p = self.problem
        if p.num_splits is not None:
            # A row has no more tiles than this; runs of one tile each are all the same from there on.
            tiles = self.tiling.tiles_per_page * ceil_div(p.num_entries, self.tiling.pages_per_tile)
            return Schedule.fixed(p.batch, min(p.num_splits, tiles))
        return Schedule.balanced(p.batch, self.config.num_parts)

    @property
    def vector_rows(self) -> bool:
        """Whether all rows' lengths are summed as vectors; a fixed split needs no sums over rows."""
        return self.problem.num_splits is None and self.problem.batch > MAX_SCALAR_ROWS

    @property
    def cuts_rows(self) -> bool:
        """Whether a row can lie in several parts."""
        return self.schedule.cuts_rows

    @property
    def pieces_per_row(self) -> int:
        """Pieces that a row is cut into where all rows are equal, rounded up to a power of two."""
        return pieces_per_row(self.problem.num_splits, self.schedule)

    @property
    def merge_slices(self) -> int:
        """Blocks that share the merge of one cut row: more where rows are few and cut into many pieces."""
        slices = 1
        if self.v_columns != self.problem.v_head_dim:
            return slices
        while (
            2 * slices <= self.pieces_per_row
            and self.v_columns % (2 * slices * PIECE_ROWS) == 0
            and 2 * slices * self.heads * self.schedule.num_cut_rows <= MAX_MERGE_BLOCKS
        ):
            slices *= 2
        return slices

    def partial_shapes(self) -> dict[str, tuple[int, ...]]:
        """Float32 results of row pieces, none where no row is cut."""
        if not self.cuts_rows:
            return {}
        lead = (self.schedule.parts, self.schedule.sides, self.heads)
        return {"acc": (*lead, self.v_columns, self.tile_heads), "max_sum": (*lead, 2, self.tile_heads)}
