"""Compiles `calls.MOVES` for an H200, without a GPU: prints what each launches, a JSON line each.

A process of its own, as `compile_calls.py`.
"""

import json

import compile_calls  # before jax, which reads the environment that it sets
import jax
from calls import MOVES


def main():
    sharding = compile_calls.h200()
    for move in MOVES:
        to_compile = move.traceable()
        arguments = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), to_compile.arguments
        )
        jitted = jax.jit(to_compile.function, donate_argnums=to_compile.donated)
        text = jitted.trace(*arguments).lower().compile().as_text() or ""
        print(json.dumps(compile_calls.operations(text)), flush=True)


if __name__ == "__main__":
    main()
