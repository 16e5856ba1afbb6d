"""Blockwise attention in plain jnp: runs on every platform, in memory of one tile a row."""

from jax_paged_attn.kernels.xla.decode import Config as Config
from jax_paged_attn.kernels.xla.decode import decode as decode
from jax_paged_attn.kernels.xla.decode import default_config as default_config
from jax_paged_attn.kernels.xla.decode import usage as usage
from jax_paged_attn.kernels.xla.decode import why_not as why_not

__all__ = ["Config", "decode", "default_config", "usage", "why_not"]
