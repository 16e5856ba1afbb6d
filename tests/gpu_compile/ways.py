"""How a step may be cut over 8 GPUs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Way:
    """How many of the 8 GPUs each cut is over, and the exchanges between them that a step should take."""

    heads: int = 1
    rows: int = 1
    context: int = 1
    num_q_heads: int = 32
    num_kv_heads: int = 8
    collectives: tuple[tuple[str, int], ...] = ()


WAYS = {
    "heads": Way(heads=8),
    "more GPUs than kv heads": Way(heads=8, num_kv_heads=2),
    "rows": Way(rows=8),
    "context, summed": Way(context=8, num_q_heads=12, num_kv_heads=4, collectives=(("all-reduce", 2),)),
    "all three": Way(2, 2, 2, collectives=(("all-to-all", 1),)),
}
