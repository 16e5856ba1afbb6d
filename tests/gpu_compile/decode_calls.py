"""The decode calls that have to compile for an H200: real models' heads, and the ways of calling."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `paged_attention`, or of `decode_attention` where `page_size` is None."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 64
    max_kv_len: int = 4096
    page_size: int | None = 16
    kv_layout: str = "HND"
    dtype: str = "bfloat16"
    kv_starts: bool = False
    v_head_dim: int | None = None  # head_dim
    stacked: bool = False  # called in a scan, whose iterations' results are stacked
    options: tuple[tuple[str, object], ...] = ()  # further keyword arguments


MODELS = {
    "Llama-3 8B": (32, 8, 128),
    "Llama-3 70B": (64, 8, 128),
    "Qwen2.5 7B": (28, 4, 128),
    "Gemma-2 9B": (16, 8, 256),
    "Phi-3 mini": (32, 32, 96),
    "Phi-2": (32, 32, 80),
    "SmolLM2 135M": (9, 3, 64),
    "Falcon 7B": (71, 1, 64),
    "StarCoder 15B": (48, 1, 128),
}

CALLS: dict[str, tuple[Call, ...]] = {
    model: (
        Call(*heads, page_size=16),
        Call(*heads, page_size=64, kv_layout="NHD"),
        Call(*heads, page_size=64, batch=8, max_kv_len=1024),
        Call(*heads, page_size=16, kv_layout="NHD", batch=1, max_kv_len=131072),
    )
    for model, heads in MODELS.items()
}

llama = MODELS["Llama-3 8B"]
CALLS["page sizes"] = tuple(Call(*llama, page_size=n) for n in (1, 8, 12, 128, 544, 2048))
CALLS["options"] = (
    Call(*llama, kv_layout="HPND"),
    Call(*llama, dtype="float16"),
    Call(*llama, kv_starts=True),
    Call(*llama, options=(("return_lse", True),)),
    Call(*llama, options=(("num_splits", 4),)),
    Call(*llama, page_size=None),
    Call(*llama, page_size=None, kv_layout="NHD"),
)
CALLS["scan"] = (Call(*llama, stacked=True), Call(*llama, stacked=True, options=(("return_lse", True),)))
CALLS["limits"] = (
    Call(32, 2, 256, options=(("return_lse", True),)),  # most registers: 16 query heads of 256
    Call(32, 8, 192, v_head_dim=128, options=(("return_lse", True),)),
    Call(16, 16, 16, v_head_dim=256),
    Call(*llama, batch=512, kv_starts=True),
    Call(*llama, batch=2, options=(("num_splits", 32), ("return_lse", True))),
)
