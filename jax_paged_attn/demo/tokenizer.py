"""The model's own tokenizer and chat template, built from the metadata of its GGUF file."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jax_paged_attn.demo.errors import DemoError
from jax_paged_attn.demo.gguf_file import GGUFFile

# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Chat models end a turn with one of these control tokens, which need not be the file's eos token.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>")

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Templates take milliseconds; the sandbox lets one of them loop for as long as it likes.
_TEMPLATE_SECONDS = 5.0

# How text is cut into words before merging, by tokenizer.ggml.pre.
_GPT2_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2_WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2_WORDS]),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


class ChatTokenizer:
    """Text to token ids and back for one model.

    Attributes
    ----------
    stop_ids : frozenset of int
        The tokens that end an answer.
    """

    def __init__(self, file: GGUFFile):
        tokens = file.require_list("tokenizer.ggml.tokens", str)
        kinds = file.find_list("tokenizer.ggml.token_type", int, len(tokens))
        kinds = kinds or [_NORMAL] * len(tokens)
        model = file.require("tokenizer.ggml.model", str)
        if model == "gpt2":
            self._tokenizer = _gpt2_tokenizer(file, tokens)
        elif model == "llama":
            self._tokenizer = _sentencepiece_tokenizer(file, tokens, kinds)
        else:
            raise DemoError(f"{file.path}: tokenizer {model!r} is not supported; supported: 'gpt2', 'llama'")
        self._tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )

        bos_id, eos_id, eot_id = (
            file.find(f"tokenizer.ggml.{name}_token_id", int, least=0, most=len(tokens) - 1)
            for name in ("bos", "eos", "eot")
        )
        self._bos, self._eos = ("" if token_id is None else tokens[token_id] for token_id in (bos_id, eos_id))
        self._add_bos = file.get("tokenizer.ggml.add_bos_token", bool, model == "llama")
        self._template = file.find("tokenizer.chat_template", str)
        self.stop_ids = frozenset(
            i
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if i in (eos_id, eot_id) or (kind == _CONTROL and token in _ENDS_OF_TURN)
        )

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a user's message in the model's chat template, or of the bare text if it has none."""
        text = self._as_chat(prompt) if self._template else prompt
        if self._add_bos and not text.startswith(self._bos):
            text = self._bos + text
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, in which the names of special tokens stand for the tokens."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # Bare exceptions come from tokenizers, also for text (a template's) that is no valid Unicode.
        except Exception as error:
            raise DemoError(f"the model's tokenizer failed: {error}") from error

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def stream(self) -> "TextStream":
        """Start the text of one answer, whose tokens come one at a time."""
        return TextStream(self._tokenizer)

    def _as_chat(self, prompt: str) -> str:
        # The template comes with the model file: it runs sandboxed.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            with _time_limit(_TEMPLATE_SECONDS):
                return environment.from_string(self._template or "").render(
                    messages=[{"role": "user", "content": prompt}],
                    add_generation_prompt=True,
                    bos_token=self._bos,
                    eos_token=self._eos,
                )
        # A template is a program: it can fail in any way.
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DemoError(f"the model's chat template failed: {reason}") from error


class TextStream:
    """Turns token ids into text piece by piece; a character cut in two by tokens waits for its end.

    The DecodeStream of tokenizers is not used: it raises an error where a byte token turns those before it
    into no character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._given: list[int] = []  # the tokens of the last piece, after which a space is not the first
        self._waiting: list[int] = []

    def add(self, token_id: int) -> str:
        """Return the text that this token completes, possibly none."""
        self._waiting.append(token_id)
        given = self._tokenizer.decode(self._given, skip_special_tokens=True)
        text = self._tokenizer.decode(self._given + self._waiting, skip_special_tokens=True)
        if len(text) <= len(given) or text.endswith("\ufffd"):
            return ""
        self._given, self._waiting = self._waiting, []
        return text[len(given) :]


def _gpt2_tokenizer(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte has a printable stand-in, so that no text is unknown."""
    pre = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(map(repr, _PRE_TOKENIZERS))
        raise DemoError(f"{file.path}: pre-tokenizer {pre!r} is not supported; supported: {supported}")
    merges = []
    for merge in file.require_list("tokenizer.ggml.merges", str):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise DemoError(f"{file.path}: a merge must be two tokens with a space between, got {merge!r}")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even where its merges would cut it differently.
    tokenizer = Tokenizer(_bpe(file, vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(file: GGUFFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Sentencepiece BPE, whose file gives a score for each token instead of a list of merges."""
    scores = file.require_list("tokenizer.ggml.scores", float, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    # Every way to make a token of two others is a merge; the token with the highest score is made first.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(mergeable, key=lambda token: (-scores[vocab[token]], vocab[token]))
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    byte_fallback = _BYTE in kinds
    tokenizer = Tokenizer(
        _bpe(file, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    space = "\u2581"
    add_prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [normalizers.Prepend(space)] if add_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", space)])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _bpe(file: GGUFFile, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    # Bare exceptions are what tokenizers raises, as for a merge of tokens that are not in the vocabulary.
    except Exception as error:
        raise DemoError(f"{file.path}: its tokens and merges make no tokenizer: {error}") from error


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread, the only one that hears signals, when the time is over."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"it runs for more than {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
