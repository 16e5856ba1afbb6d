"""The page table: which pages of the pool hold which row's tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_paged_attn import validation
from jax_paged_attn.validation import Ints

_INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: arrays have no one truth value
class PageTable:
    """Where each row's tokens lie in a pool of pages; one form for block tables and CSR tables.

    Token ``p`` of row ``b`` lies in slot ``p % page_size`` of page
    ``indices[row_starts[b] + p // page_size]``. Rows may share pages and entries, and lie in any order.
    A pytree: pass it through ``jax.jit``, ``jax.vmap``, ``jax.lax.scan`` and ``jax.export`` as one argument.
    Build it with `from_block_tables` or `from_csr`; an unbatched table (of one row) has scalars for the last
    three fields.

    Entries past a row's last used page are never trusted and may hold anything. A row never reads beyond its
    own entries: functions clip ``kv_lens`` to ``[0, row_pages * page_size]``.

    Attributes
    ----------
    indices : int32[num_entries]
        Physical page ids.
    row_starts : int32[batch]
        Row ``b``'s entries begin at ``indices[row_starts[b]]``.
    row_pages : int32[batch]
        How many entries row ``b`` owns.
    kv_lens : int32[batch]
        How many valid tokens row ``b`` has.
    """

    indices: jax.Array
    row_starts: jax.Array
    row_pages: jax.Array
    kv_lens: jax.Array

    @classmethod
    def from_block_tables(cls, block_tables: Ints, seq_lens: Ints) -> "PageTable":
        """Build a page table from a padded block table, as vLLM and FlashAttention use.

        Parameters
        ----------
        block_tables : int[batch, max_pages_per_seq] or int[max_pages_per_seq]
            Physical page ids, row by row. One dimension makes an unbatched table.
        seq_lens : int[batch], or a scalar with a one-dimensional block table
            Valid tokens of each row.

        Returns
        -------
        PageTable
            Values outside int32 are saturated.

        Raises
        ------
        ValueError
            If an argument isn't an integer array, or the shapes don't fit each other.

        Examples
        --------
        >>> PageTable.from_block_tables([[7, 2], [4, -1]], [20, 3]).row_starts.tolist()
        [0, 2]
        """
        block_tables = validation.as_int32("block_tables", block_tables)
        seq_lens = validation.as_int32("seq_lens", seq_lens)
        validation.check(
            block_tables.ndim in (1, 2),
            "block_tables",
            "shape [batch, max_pages_per_seq] or [max_pages_per_seq]",
            f"shape {block_tables.shape}",
        )
        rows, width = block_tables.shape[:-1], block_tables.shape[-1]
        validation.check_shape("seq_lens", seq_lens, rows)
        row_starts = width * jnp.arange(rows[0], dtype=jnp.int32) if rows else jnp.int32(0)
        return cls(
            indices=block_tables.reshape(-1),
            row_starts=row_starts,
            row_pages=jnp.full(rows, width, jnp.int32),
            kv_lens=seq_lens,
        )

    @classmethod
    def from_csr(
        cls,
        indptr: Ints,
        indices: Ints,
        last_page_len: Ints,
        *,
        page_size: int,
        validate_values: bool = False,
    ) -> "PageTable":
        """Build a page table from compressed rows, as FlashInfer and SGLang use.

        Parameters
        ----------
        indptr : int[batch + 1]
            Row ``b`` owns ``indices[indptr[b]:indptr[b + 1]]``.
        indices : int[num_entries]
            Physical page ids.
        last_page_len : int[batch]
            Valid tokens of each row's last page, in ``[1, page_size]``; 0 (or anything else) in a row without
            pages.
        page_size : int
            Tokens a page.
        validate_values : bool
            Also check the values: ValueError for concrete arrays, `jax.experimental.checkify` checks for
            traced ones.

        Returns
        -------
        PageTable
            Values outside int32 are saturated, ``kv_lens`` too; ``last_page_len`` is clipped to
            ``[0, page_size]``.

        Raises
        ------
        ValueError
            If an argument isn't an integer array, `page_size` isn't an int in ``[1, 2**31 - 1]``, or the
            shapes don't fit each other; with `validate_values` also if ``indptr`` falls or leaves
            ``[0, num_entries]``, or ``last_page_len`` is out of range.

        Examples
        --------
        >>> PageTable.from_csr([0, 2, 3], [7, 2, 4], [4, 3], page_size=16).kv_lens.tolist()
        [20, 3]
        """
        indptr = validation.as_int32("indptr", indptr)
        indices = validation.as_int32("indices", indices)
        last_page_len = validation.as_int32("last_page_len", last_page_len)
        validation.check_positive_int("page_size", page_size, _INT32_MAX)
        page_size = int(page_size)  # a numpy integer would widen what it multiplies
        validation.check_bool("validate_values", validate_values)
        validation.check(
            indptr.ndim == 1 and indptr.shape[0] != 0, "indptr", "shape [batch + 1]", f"shape {indptr.shape}"
        )
        validation.check(indices.ndim == 1, "indices", "shape [num_entries]", f"shape {indices.shape}")
        validation.check_shape("last_page_len", last_page_len, (indptr.shape[0] - 1,))
        if validate_values:
            validation.check_csr_values(indptr, indices, last_page_len, page_size)
        # Clipped before multiplying, so that a wild indptr can't wrap around to a plausible length.
        row_pages = jnp.clip(indptr[1:] - indptr[:-1], 0, indices.shape[0])
        full_pages = jnp.maximum(row_pages - 1, 0)
        last_page_len = jnp.where(row_pages > 0, jnp.clip(last_page_len, 0, page_size), 0)
        fits = full_pages <= (_INT32_MAX - last_page_len) // page_size
        return cls(
            indices=indices,
            row_starts=indptr[:-1],
            row_pages=row_pages,
            kv_lens=jnp.where(fits, full_pages * page_size + last_page_len, _INT32_MAX),
        )

    def as_batched(self) -> "PageTable":
        """Turn an unbatched table into a batch of one row."""
        return PageTable(self.indices, self.row_starts[None], self.row_pages[None], self.kv_lens[None])

    def clipped(self, page_size: int) -> tuple[jax.Array, jax.Array]:
        """Clip rows to the entries that exist, and lengths to the tokens that a row's own entries hold.

        Returns
        -------
        row_starts, kv_lens : int32[batch]
        """
        num_entries = self.indices.shape[0]
        row_starts = jnp.clip(self.row_starts, 0, num_entries)
        pages = jnp.clip(self.row_pages, 0, num_entries - row_starts)
        lens = jnp.maximum(self.kv_lens, 0)
        # The product is taken only where it is below lens: elsewhere it could overflow int32.
        return row_starts, jnp.where(-(-lens // page_size) <= pages, lens, pages * page_size)


def register_export(node_type: type, name: str) -> None:
    """Let `jax.export` serialize functions that take or return a dataclass of arrays alone."""
    jax.export.register_pytree_node_serialization(
        node_type,
        serialized_name=f"jax_paged_attn.{name}",
        serialize_auxdata=lambda aux_data: b"",
        deserialize_auxdata=lambda data: (),
        from_children=lambda aux_data, children: node_type(*children),
    )


register_export(PageTable, "PageTable")
