"""Benchmarks of `jax_paged_attn`, run from the root of the repository: ``python -m benchmarks.decode``."""
