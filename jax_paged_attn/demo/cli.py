"""Command line of the demo: options, their checks, and how each failure ends."""

import argparse
import importlib.util
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.terminal import printable
from jax_paged_attn.dispatch import IMPLEMENTATIONS

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
PACKAGES = ("gguf", "tokenizers", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status.

    It is 0, 1 for an error, 2 for wrong options, and as a shell would have it 130 for Ctrl-C and 141 where
    nobody reads the output any more.
    """
    _prepare_streams()
    try:
        try:
            _parse_and_run(argv)
        finally:
            # What is still buffered must fail here: at exit it would be a traceback.
            sys.stdout.flush()
    except DemoError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    # Files are read elsewhere, where errors name them: what is left is the output.
    except OSError as error:
        _discard_output()
        return _fail(f"cannot write the output: {error.strerror or error}")
    except MemoryError:
        return _fail("out of memory")
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail(f"out of memory: {str(error).splitlines()[0]}")
    return 0


def _parse_and_run(argv: Sequence[str] | None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.speculative and args.temperature:
        parser.error("argument --speculative: drafts are verified greedily, which needs --temperature 0")
    _require_packages()
    # Imported here so that `--help` and wrong options need none of the packages.
    from jax_paged_attn.demo.run import run

    run(args)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the demo's options."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_paged_attn.demo",
        description="Generate text with a Llama model whose KV cache is paged. The default is SmolLM2-135M.",
    )
    add = parser.add_argument
    add("--gguf", type=Path, metavar="PATH", help="a GGUF file of the llama architecture (default: SmolLM2)")
    add(
        "--prompt",
        type=_text,
        action="append",
        metavar="TEXT",
        help="may be repeated: one batch runs them all",
    )
    add("--max-tokens", type=_whole_number(1), default=64, metavar="N", help="tokens an answer (default: 64)")
    add("--page-size", type=_whole_number(1), default=16, metavar="N", help="tokens a page (default: 16)")
    add(
        "--implementation",
        choices=[implementation.name for implementation in IMPLEMENTATIONS],
        help="of paged_attention (default: the first that can run here)",
    )
    add("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on a GPU, else float32)")
    add(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="of the cache; fp8 is float8_e4m3fn (default: that of the weights)",
    )
    add(
        "--window",
        type=_whole_number(1),
        metavar="N",
        help="sliding window: a token attends to N tokens at most, itself included (default: all)",
    )
    add(
        "--speculative",
        type=_whole_number(1, 64),
        default=0,
        metavar="N",
        help="draft up to N tokens a step from what was said before, and verify them: the same answers",
    )
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0, the default, is greedy")
    add(
        "--seed",
        type=_whole_number(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of sampling and page order (default: 0)",
    )
    add(
        "--check",
        action="store_true",
        help="replay the answers with a dense, unpaged cache and fail unless it picks the same tokens",
    )
    return parser


def _require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f'the demo needs {", ".join(missing)}: pip install ".[demo]" in its folder')


def _prepare_streams() -> None:
    """Let any text be written: no encoding must fail, nor a stream that the shell closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open until the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def _discard_output() -> None:
    """Send what is left in the buffers, which would fail again at exit, to nowhere."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return 1


def _text(text: str) -> str:
    """Text that can be encoded: where the locale could not decode it, its bytes must be UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return os.fsencode(text).decode()
        except UnicodeError:
            raise argparse.ArgumentTypeError(f"expected text in UTF-8, got {text!r}") from None
    return text


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return value

    return parse


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Far beyond any use, and far from where float32 ends.
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text!r}")
    return value
