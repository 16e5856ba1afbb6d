"""The static side of a launch: the configuration, and what follows from it and from the problem."""

import dataclasses

from jax_paged_attn.validation import Problem

from .integers import ceil_div, round_up
from .layouts import MMA_COLUMNS, MMA_DEPTH, MMA_ROWS, PIECE_ROWS
from .schedule import Schedule
from .tiling import Tiling

MAX_TILE_HEADS = 16  # query heads of a tile: more do not leave registers for q and the output
# Up to here a loop over the lengths finds a part's place as fast as vector sums do (H200: 1 us faster at 8
# rows, 1 us slower at 64).
MAX_SCALAR_ROWS = 32
MAX_ROWS = 512  # rows of one launch: each takes shared memory
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
        for name in ("block_kv", "num_stages", "num_parts"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.block_kv % MMA_ROWS:
            raise ValueError(f"block_kv must be a multiple of {MMA_ROWS}, got {self.block_kv}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every static quantity of a launch, derived from the problem and the configuration."""

    problem: Problem
    config: Config

    @property
    def tiling(self) -> Tiling:
        p = self.problem
        # Rows of V fill multiples of 128 bytes by themselves.
        return Tiling.choose(p.page_size, self.config.block_kv, self.k_columns * p.dtype.itemsize)

    @property
    def head_groups(self) -> int:
        """Tiles that a kv head's query heads take; each reads the cache again, mostly from L2."""
        return ceil_div(self.problem.group_size, MAX_TILE_HEADS)

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile, padded to the matrix unit's step."""
        return round_up(ceil_div(self.problem.group_size, self.head_groups), MMA_COLUMNS)

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
            return Schedule.fixed(p.batch, p.num_splits)
        return Schedule.balanced(p.batch, self.config.num_parts)

    @property
    def vector_rows(self) -> bool:
        """Whether all rows' lengths are summed as vectors; a fixed split needs no sums over rows."""
        return self.problem.num_splits is None and self.problem.batch > MAX_SCALAR_ROWS

    @property
    def cut_row_of_each_row(self) -> bool:
        """Whether each row, rather than each part, has an entry in the list of cut rows."""
        return self.problem.batch <= self.schedule.parts

    @property
    def num_cut_rows(self) -> int:
        """Entries in the list of cut rows: a part's end cuts at most one row."""
        return min(self.problem.batch, self.schedule.parts)

    @property
    def pieces_per_row(self) -> int:
        """Pieces that a row is cut into where all rows are equal, rounded up to a power of two."""
        return 1 << (ceil_div(self.schedule.parts, self.problem.batch) - 1).bit_length()

    @property
    def merge_slices(self) -> int:
        """Blocks that share the merge of one cut row: more where rows are few and cut into many pieces."""
        slices = 1
        if self.v_columns != self.problem.v_head_dim:
            return slices
        while (
            2 * slices <= self.pieces_per_row
            and self.v_columns % (2 * slices * PIECE_ROWS) == 0
            and 2 * slices * self.heads * self.num_cut_rows <= MAX_MERGE_BLOCKS
        ):
            slices *= 2
        return slices

    def partial_shapes(self) -> dict[str, tuple[int, ...]]:
        """Float32 results of row pieces. Side 0 continues an earlier part, side 1 goes on in the next one."""
        lead = (self.schedule.parts, 2, self.heads)
        return {"acc": (*lead, self.v_columns, self.tile_heads), "max_sum": (*lead, 2, self.tile_heads)}
