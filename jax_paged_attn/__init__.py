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
from jax_paged_attn.grouped_gemm import grouped_gemm as grouped_gemm
from jax_paged_attn.merge import merge_state as merge_state
from jax_paged_attn.merge import merge_states as merge_states
from jax_paged_attn.mla import append_paged_mla_kv as append_paged_mla_kv
from jax_paged_attn.mla import mla_decode as mla_decode
from jax_paged_attn.mla_assemble import mla_cache_assemble as mla_cache_assemble
from jax_paged_attn.mla_assemble import mla_kv_assemble as mla_kv_assemble
from jax_paged_attn.mla_assemble import mla_q_final_assemble as mla_q_final_assemble
from jax_paged_attn.mla_assemble import mla_q_rope_extract as mla_q_rope_extract
from jax_paged_attn.mla_assemble import mla_q_rope_writeback as mla_q_rope_writeback
from jax_paged_attn.mla_prefill import mla_fused_prefill as mla_fused_prefill
from jax_paged_attn.mla_prefill import mla_prefill_attention as mla_prefill_attention
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
    "append_paged_mla_kv",
    "apply_rope",
    "cascade_attention",
    "copy_pages",
    "decode_attention",
    "explain",
    "grouped_gemm",
    "kv_quantize",
    "kv_scale",
    "merge_state",
    "merge_states",
    "mla_cache_assemble",
    "mla_decode",
    "mla_fused_prefill",
    "mla_kv_assemble",
    "mla_prefill_attention",
    "mla_q_final_assemble",
    "mla_q_rope_extract",
    "mla_q_rope_writeback",
    "paged_attention",
    "ragged_paged_attention",
    "reference",
    "rope_append_paged_kv",
    "rope_cos_sin",
    "rope_frequencies",
    "sharding",
    "slot_mapping",
]
