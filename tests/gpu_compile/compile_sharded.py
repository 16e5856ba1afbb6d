"""Compiles a sharded decode step for 8 H200s, on a machine without a GPU.

`python compile_sharded.py WAY` prints one JSON line: what the step became, on each of the GPUs. A process of
its own, as `compile_calls.py`.
"""

import json
import math
import sys

import compile_calls  # before jax, which reads the environment that it sets
import jax
import jax.numpy as jnp
import numpy as np
from ways import WAYS, Way

from jax_paged_attn import PageTable, testing
from jax_paged_attn.sharding import CacheSharding, ShardedPageTable

BATCH, PAGES, PAGE_SIZE, HEAD_DIM, WIDTH = 64, 4096, 64, 128, 64


def compile_step(way: Way):
    cuts = {name: getattr(way, name) for name in ("rows", "heads", "context")}
    devices = np.array(compile_calls.h200s(math.prod(cuts.values())))
    mesh = jax.sharding.Mesh(devices.reshape(tuple(cuts.values())), tuple(cuts))
    sharded = CacheSharding(mesh, **{name: name if size > 1 else None for name, size in cuts.items()})

    def array(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

    stored = sharded.stored_kv_heads(way.num_kv_heads)
    pool_shape = (PAGES, stored, PAGE_SIZE, HEAD_DIM)
    pool = array(pool_shape, jnp.bfloat16, *sharded.pages_spec())
    new_heads = sharded.heads if stored == way.num_kv_heads else None
    new = array((BATCH, way.num_kv_heads, HEAD_DIM), jnp.bfloat16, sharded.rows, new_heads)
    q = array((BATCH, way.num_q_heads, HEAD_DIM), jnp.bfloat16, sharded.rows, sharded.heads)
    shards = (way.rows, BATCH // way.rows) if sharded.rows else (BATCH,)
    make = (ShardedPageTable if sharded.rows else PageTable).from_block_tables
    table, slots = jax.eval_shape(
        lambda tables, lens: (make(tables, lens), lens),
        jax.ShapeDtypeStruct((*shards, WIDTH), jnp.int32),
        jax.ShapeDtypeStruct(shards, jnp.int32),
    )
    table, slots = jax.tree.map(lambda x: array(x.shape, x.dtype, sharded.rows), (table, slots))
    inv_freq = array((HEAD_DIM // 2,), jnp.float32)

    def step(k_pages, v_pages, q, k_new, v_new, positions, slots, table, inv_freq):
        q, k_pages, v_pages = sharded.rope_append_paged_kv(
            q, k_new, v_new, positions, k_pages, v_pages, slots, inv_freq=inv_freq
        )
        return sharded.paged_attention(q, k_pages, v_pages, table), k_pages, v_pages

    positions = array((BATCH,), jnp.int32, sharded.rows)
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(
        pool, pool, q, new, new, positions, slots, table, inv_freq
    )
    program = traced.lower().compile()
    text = program.as_text() or ""
    local = pool.sharding.shard_shape(pool_shape)
    launches, compiled = compile_calls.new_in_dump(set())
    return {
        "collectives": testing.collectives(program),
        "pool_copies": compile_calls.pool_copies(text, jax.ShapeDtypeStruct(local, pool.dtype)),
        "torn_aliases": compile_calls.torn_aliases(text),
        "launches": list(launches),
        "compiled": compiled,
    }


if __name__ == "__main__":
    print(json.dumps(compile_step(WAYS[sys.argv[1]])), flush=True)
