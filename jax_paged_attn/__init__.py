"""Decode attention and paged KV-cache attention for JAX on NVIDIA GPUs."""

from jax_paged_attn import reference as reference
from jax_paged_attn.decode import decode_attention as decode_attention
from jax_paged_attn.dispatch import explain as explain
from jax_paged_attn.merge import merge_state as merge_state
from jax_paged_attn.merge import merge_states as merge_states
from jax_paged_attn.page_copy import copy_pages as copy_pages
from jax_paged_attn.page_pool import PagePool as PagePool
from jax_paged_attn.page_pool import PoolExhausted as PoolExhausted
from jax_paged_attn.page_table import PageTable as PageTable
from jax_paged_attn.paged import paged_attention as paged_attention

__all__ = [
    "PagePool",
    "PageTable",
    "PoolExhausted",
    "copy_pages",
    "decode_attention",
    "explain",
    "merge_state",
    "merge_states",
    "paged_attention",
    "reference",
]
