"""The attention functions of the deprecated `jax.experimental.pallas.ops.gpu`, by this library's kernels.

Replace ``jax.experimental.pallas.ops.gpu`` by ``jax_paged_attn.compat.pallas_ops`` in the import; modules and
functions have the same names and signatures. Arguments that tuned the kernels (`block_h`, `block_k`,
`pages_per_compute_block`, `k_splits`, `num_warps`, `num_stages`, `grid`, `interpret`, `debug`) are accepted
and ignored, and sizes need not divide by them.
"""

from jax_paged_attn.compat.pallas_ops import decode_attention as decode_attention
from jax_paged_attn.compat.pallas_ops.paged_attention import paged_attention as paged_attention

# In jax the name is a module's, which has the function.
setattr(paged_attention, "paged_attention", paged_attention)  # noqa: B010

__all__ = ["decode_attention", "paged_attention"]
