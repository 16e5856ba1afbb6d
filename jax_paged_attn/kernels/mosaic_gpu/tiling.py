"""How the keys of a row fall into tiles, whatever the page size.

A tile is what one step of the kernel reads: `block_kv` rows of shared memory for K and as many for V. Small
pages share a tile, each at its own offset; a page larger than a tile is walked in several tiles. A tile never
straddles two large pages, so that each copy stays inside one page.
"""

import dataclasses

from .integers import div, rem


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The static map between key positions of a row and rows of a tile.

    Attributes
    ----------
    page_size : int
        Keys in a page.
    block_kv : int
        Rows of a tile in shared memory.
    copy_rows : int
        Keys that one copy brings: a page, or a tile's part of a large page.
    pages_per_tile : int
        Copies of a tile; 1 for large pages.
    tiles_per_page : int
        Tiles of a page; 1 for small pages.
    pitch : int
        Rows of a tile between the starts of two pages.
    swizzled : bool
        Whether a tile can lie in shared memory in groups of 8 rows, as fast matrix loads want.
    """

    page_size: int
    block_kv: int
    copy_rows: int
    pages_per_tile: int
    tiles_per_page: int
    pitch: int
    swizzled: bool

    @classmethod
    def choose(cls, page_size: int, block_kv: int, row_bytes: int) -> "Tiling":
        """Fit pages into tiles of `block_kv` rows; `pitch * row_bytes` keeps copies aligned to 128 bytes."""
        swizzled = page_size % 8 == 0
        if page_size >= block_kv:
            return cls(page_size, block_kv, block_kv, 1, -(-page_size // block_kv), block_kv, swizzled)
        pitch = page_size
        while pitch * row_bytes % 128:
            pitch += 1
        return cls(page_size, block_kv, page_size, max(block_kv // pitch, 1), 1, pitch, swizzled)

    @property
    def keys_per_tile(self) -> int:
        """Keys that a tile holds at most; equal to `block_kv` where `dense`."""
        return self.pages_per_tile * self.copy_rows

    @property
    def used(self) -> float:
        """Share of the rows of a full page's tiles, or of a tile of full pages, that are keys."""
        if self.tiles_per_page > 1:
            return self.page_size / (self.tiles_per_page * self.block_kv)
        return self.keys_per_tile / self.block_kv

    @property
    def dense(self) -> bool:
        """Whether every row of a tile before the row's end is a key: then only a row's ends need a mask."""
        if self.tiles_per_page > 1:
            return self.page_size % self.block_kv == 0
        return self.keys_per_tile == self.block_kv

    def tile_of(self, position):
        """The tile of a row that holds the key at `position` (traced or not)."""
        if self.tiles_per_page > 1:
            page, offset = div(position, self.page_size), rem(position, self.page_size)
            return page * self.tiles_per_page + div(offset, self.block_kv)
        return div(position, self.keys_per_tile)

    def first_page(self, tile):
        """The first of the row's table entries that `tile` reads."""
        return div(tile, self.tiles_per_page) if self.tiles_per_page > 1 else tile * self.pages_per_tile

    def block_in_page(self, tile):
        """Which run of `copy_rows` keys of its page `tile` reads."""
        return rem(tile, self.tiles_per_page) if self.tiles_per_page > 1 else tile * 0

    def position_of(self, tile, row):
        """(key position, whether it is a key at all) of row `row` of `tile`; `row` may be a vector."""
        if self.tiles_per_page > 1:
            in_page = self.block_in_page(tile) * self.block_kv + row
            return self.first_page(tile) * self.page_size + in_page, in_page < self.page_size
        if self.dense:
            return tile * self.block_kv + row, None
        page, offset = div(row, self.pitch), rem(row, self.pitch)
        position = (tile * self.pages_per_tile + page) * self.page_size + offset
        return position, (offset < self.page_size) & (page < self.pages_per_tile)
