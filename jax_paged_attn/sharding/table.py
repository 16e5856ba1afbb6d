"""Page tables of several pools, with ids that are local to each."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_paged_attn import append, validation
from jax_paged_attn.page_table import PageTable, register_export
from jax_paged_attn.validation import Ints


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ShardedPageTable:
    """One page table for each shard of rows, with page ids of the shard's own pool.

    A type of its own, because its ids are local: shard i's page 0 is page ``i * num_pages / num_shards`` of
    the array that all the pools make. Functions that want one kind of table refuse the other.

    Attributes
    ----------
    tables : PageTable
        Its arrays have a leading axis [num_shards].
    """

    tables: PageTable

    @classmethod
    def from_block_tables(cls, block_tables: Ints, seq_lens: Ints) -> "ShardedPageTable":
        """Build it from the padded block tables of all shards.

        Parameters
        ----------
        block_tables : int[num_shards, rows, max_pages_per_seq]
            Page ids in each shard's own pool, which begin at 0.
        seq_lens : int[num_shards, rows]
            Valid tokens of each row.

        Raises
        ------
        ValueError
            If an argument isn't an integer array, or the shapes don't fit each other.

        Examples
        --------
        >>> table = ShardedPageTable.from_block_tables([[[1, 0]], [[0, -1]]], [[20], [3]])
        >>> table.num_shards, table.slot_mapping([[0], [0]], [[19], [2]], page_size=16).tolist()
        (2, [[3], [2]])
        """
        block_tables = validation.as_int32("block_tables", block_tables)
        seq_lens = validation.as_int32("seq_lens", seq_lens)
        validation.check(
            block_tables.ndim == 3,
            "block_tables",
            "shape [num_shards, rows, max_pages_per_seq]",
            f"shape {block_tables.shape}",
        )
        validation.check_shape("seq_lens", seq_lens, block_tables.shape[:2])
        return cls(jax.vmap(PageTable.from_block_tables)(block_tables, seq_lens))

    @classmethod
    def stack(cls, tables: Sequence[PageTable]) -> "ShardedPageTable":
        """Build it from one table a shard, such as `PagePool.page_table` makes, all of the same shapes.

        Raises
        ------
        ValueError
            If there is none, or the shapes differ.

        Examples
        --------
        >>> table = PageTable.from_block_tables([[1, 0]], [20])
        >>> ShardedPageTable.stack([table, table]).num_shards
        2
        """
        tables = [validation.as_page_table(table) for table in tables]
        validation.check(bool(tables), "tables", "at least one PageTable", "none")
        shapes = [jax.tree.map(jnp.shape, jax.tree.leaves(table)) for table in tables]
        validation.check(
            all(shape == shapes[0] for shape in shapes),
            "tables",
            "tables of one shape (pad block tables to one width)",
            f"shapes {shapes}",
        )
        return cls(jax.tree.map(lambda *leaves: jnp.stack(leaves), *tables))

    @property
    def num_shards(self) -> int:
        """How many tables there are."""
        return self.tables.kv_lens.shape[0]

    def slot_mapping(self, batch_indices: Ints, positions: Ints, *, page_size: int) -> jax.Array:
        """Look up the slots of tokens, as `jax_paged_attn.slot_mapping` does in each shard.

        Parameters
        ----------
        batch_indices : int[num_shards, num_tokens]
            Row of each token, within its shard.
        positions : int[num_shards, num_tokens]
            Of each token in its row.
        page_size : int
            Tokens a page.

        Returns
        -------
        int32[num_shards, num_tokens]
            Slots of each shard's own pool.
        """
        batch_indices = validation.as_int32("batch_indices", batch_indices)
        positions = validation.as_int32("positions", positions)
        expected = f"shape [{self.num_shards} shards, num_tokens]"
        ok = batch_indices.ndim == 2 and batch_indices.shape[0] == self.num_shards
        validation.check(ok, "batch_indices", expected, f"shape {batch_indices.shape}")
        validation.check_shape("positions", positions, batch_indices.shape)

        def look_up(table, rows, positions):
            return append.slot_mapping(table, rows, positions, page_size=page_size)

        return jax.vmap(look_up)(self.tables, batch_indices, positions)


register_export(ShardedPageTable, "ShardedPageTable")
