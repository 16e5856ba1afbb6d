"""``python -m jax_paged_attn.demo``: a pretrained Llama model that answers through a paged KV cache.

Read `model.py` for how a model calls `jax_paged_attn.paged_attention`, `generate.py` for the loop around it,
with the host's side of the page table, and `draft.py` for what it drafts. The other modules load the model,
print and check.
"""
