"""Decode attention and paged KV-cache attention for JAX on NVIDIA GPUs."""

from jax_paged_attn import reference as reference
from jax_paged_attn import sharding as sharding
from jax_paged_attn.append import append_kv as append_kv
from jax_paged_attn.append import append_paged_kv as append_paged_kv
from jax_paged_attn.append import rope_append_paged_kv as rope_append_paged_kv
from jax_paged_attn.append import slot_mapping as slot_mapping
from jax_paged_attn.cascade import cascade_attention as cascade_attention
from jax_paged_attn.decode import decode_attention as decode_attention
from jax_paged_attn.dispatch import explain as explain
from jax_paged_attn.merge import merge_state as merge_state
from jax_paged_attn.merge import merge_states as merge_states
from jax_paged_attn.page_copy import copy_pages as copy_pages
from jax_paged_attn.page_pool import PagePool as PagePool
from jax_paged_attn.page_pool import PoolExhausted as PoolExhausted
from jax_paged_attn.page_table import PageTable as PageTable
from jax_paged_attn.paged import paged_attention as paged_attention
from jax_paged_attn.quantize import kv_quantize as kv_quantize
from jax_paged_attn.quantize import kv_scale as kv_scale
from jax_paged_attn.ragged import ragged_paged_attention as ragged_paged_attention
from jax_paged_attn.rope import Llama3Scaling as Llama3Scaling
from jax_paged_attn.rope import YarnScaling as YarnScaling
from jax_paged_attn.rope import apply_rope as apply_rope
from jax_paged_attn.rope import rope_cos_sin as rope_cos_sin
from jax_paged_attn.rope import rope_frequencies as rope_frequencies

__all__ = [
    "Llama3Scaling",
    "PagePool",
    "PageTable",
    "PoolExhausted",
    "YarnScaling",
    "append_kv",
    "append_paged_kv",
    "apply_rope",
    "cascade_attention",
    "copy_pages",
    "decode_attention",
    "explain",
    "kv_quantize",
    "kv_scale",
    "merge_state",
    "merge_states",
    "paged_attention",
    "ragged_paged_attention",
    "reference",
    "rope_append_paged_kv",
    "rope_cos_sin",
    "rope_frequencies",
    "sharding",
    "slot_mapping",
]
