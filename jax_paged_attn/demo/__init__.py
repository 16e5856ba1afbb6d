"""``python -m jax_paged_attn.demo``: a pretrained Llama model that answers through a paged KV cache.

Read `model.py` for how a model calls `jax_paged_attn.paged_attention`, `pages.py` for the host's side of a
page table and `generate.py` for the loop that joins them. The other modules load the model, print and check.
"""
