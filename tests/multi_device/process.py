"""One of several processes of a mesh: `python process.py ADDRESS NUM_PROCESSES ID`.

Each has its own devices and its own part of every array; together they write a step's tokens and attend.
"""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_paged_attn import reference, testing
from jax_paged_attn.sharding import CacheSharding
from tests.multi_device.test_cache_sharding import make_mesh, make_problem


def check(shape: dict[str, int], expected_collectives: dict[str, int]) -> None:
    sharded = CacheSharding(make_mesh(shape), **{name: name for name in shape})
    p = make_problem(shards=shape.get("rows", 1))
    k_new, v_new = np.random.default_rng(1).standard_normal((2, p.q.shape[0], 8, 24)).astype("float32")

    def global_array(x, spec):
        x, where = np.asarray(x), jax.NamedSharding(sharded.mesh, spec)
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    def step(k, v, q, k_new, v_new, slots, table):
        k, v = sharded.append_paged_kv(k, v, k_new, v_new, slots)
        return sharded.paged_attention(q, k, v, table, return_lse=True)

    pools = [global_array(x, sharded.pages_spec()) for x in (p.k, p.v)]
    small = (p.q, k_new, v_new, p.sharded_slots, p.sharded_table)
    small = jax.tree.map(lambda x: global_array(x, jax.P()), small)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*pools, *small).compile()
    assert testing.collectives(compiled) == expected_collectives
    result = multihost_utils.process_allgather(compiled(*pools, *small), tiled=True)
    k, v = reference.append_paged_kv(p.k, p.v, k_new, v_new, p.slots)
    expected = reference.paged_attention(p.q, k, v, p.table, return_lse=True)
    testing.assert_close(tuple(result), jax.tree.map(np.asarray, expected))


def main(address: str, num_processes: int, process: int) -> None:
    jax.distributed.initialize(address, num_processes, process)
    assert jax.local_device_count() < jax.device_count()
    heads = jax.device_count() // num_processes
    check({"rows": num_processes, "heads": heads}, {})
    check({"context": num_processes, "heads": heads}, {"all-to-all": 1})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
