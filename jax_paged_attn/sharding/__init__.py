"""Attention and cache writes over a mesh of devices and hosts."""

from jax_paged_attn.sharding.cache import CacheSharding as CacheSharding
from jax_paged_attn.sharding.local import local_lens as local_lens
from jax_paged_attn.sharding.local import local_slots as local_slots
from jax_paged_attn.sharding.local import local_table as local_table
from jax_paged_attn.sharding.local import merge_across as merge_across
from jax_paged_attn.sharding.table import ShardedPageTable as ShardedPageTable

__all__ = [
    "CacheSharding",
    "ShardedPageTable",
    "local_lens",
    "local_slots",
    "local_table",
    "merge_across",
]
