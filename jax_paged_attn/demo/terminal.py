"""What the demo prints: a progress bar, answers as they grow, a table."""

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Protocol, Self, TextIO

# A model can produce any character: those that steer a terminal are left out.
_NO_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Leave out the characters that steer a terminal."""
    return text.translate(_NO_CONTROL)


class Progress:
    """A progress bar; where the stream is not a terminal, one line at the end."""

    def __init__(self, label: str, stream: TextIO):
        self._label = label
        self._stream = stream
        self._live = _is_terminal(self._stream)
        self._started = time.perf_counter()
        self._drawn = -1
        self._done = 0
        self._draw(0)

    def add(self, amount: int, total: int) -> None:
        """Count `amount` more of `total`."""
        self._done += amount
        self._draw(100 * self._done // total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if kind is not None:
            self._stream.write("\n" if self._live else "")
            return
        line = f"{self._label}: {time.perf_counter() - self._started:.1f} s"
        self._stream.write(f"\r\x1b[K{line}\n" if self._live else f"{line}\n")
        self._stream.flush()

    def _draw(self, percent: int) -> None:
        if self._live and percent != self._drawn:
            self._drawn = percent
            filled = "#" * (percent * 30 // 100)
            self._stream.write(f"\r{self._label} [{filled:<30}] {percent:3d}%")
            self._stream.flush()


class AnswerPrinter(Protocol):
    """Shows answers while they grow; leaving its context completes what is shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def add(self, row: int, text: str) -> None:
        """Append text to the answer of prompt number `row`."""


def answer_printer(prompts: Sequence[str], stream: TextIO) -> AnswerPrinter:
    """Choose the printer that suits the number of prompts and the place that the output goes to."""
    if len(prompts) == 1:
        return SinglePrinter(prompts[0], stream)
    lines_per_answer = (shutil.get_terminal_size().lines - 1) // len(prompts) - 2
    if _is_terminal(stream) and lines_per_answer >= 1:
        return PanelPrinter(prompts, stream, lines_per_answer)
    return LinePrinter(prompts, stream)


class SinglePrinter:
    """One answer, written as it comes."""

    def __init__(self, prompt: str, stream: TextIO):
        self._prompt = prompt
        self._stream = stream

    def __enter__(self) -> Self:
        self._stream.write(f"> {self._prompt}\n")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.write("\n\n")

    def add(self, row: int, text: str) -> None:
        """Write the text at once."""
        self._stream.write(printable(text))
        self._stream.flush()


class LinePrinter:
    """Several answers in a plain stream: a line is written, after its answer's number, once it is full."""

    width = 100

    def __init__(self, prompts: Sequence[str], stream: TextIO):
        self._prompts = prompts
        self._stream = stream
        self._pending = [""] * len(prompts)

    def __enter__(self) -> Self:
        for row, prompt in enumerate(self._prompts):
            self._stream.write(f"[{row + 1}] > {prompt}\n")
        return self

    def __exit__(self, *exc_info: object) -> None:
        for row, text in enumerate(self._pending):
            if text:
                self._write(row, text)

    def add(self, row: int, text: str) -> None:
        """Write the lines that this text fills; the last, open one waits."""
        text = self._pending[row] + printable(text)
        *lines, text = text.split("\n")
        for line in lines:
            self._write(row, line)
        if len(text) > self.width:
            *lines, text = _wrap(text, self.width)
            for line in lines:
                self._write(row, line)
        self._pending[row] = text

    def _write(self, row: int, line: str) -> None:
        self._stream.write(f"[{row + 1}] {line.rstrip()}\n")
        self._stream.flush()


class PanelPrinter:
    """Several answers on a terminal: their latest lines, redrawn in place, and the whole texts at the end."""

    seconds_per_frame = 0.05

    def __init__(self, prompts: Sequence[str], stream: TextIO, lines_per_answer: int):
        self._prompts = prompts
        self._stream = stream
        self._lines_per_answer = lines_per_answer
        self._texts = [""] * len(prompts)
        self._last_frame = 0.0
        self._height = 0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lines_per_answer = sys.maxsize
        self._draw()

    def add(self, row: int, text: str) -> None:
        """Append the text and redraw, unless the last frame is too young."""
        self._texts[row] += printable(text).expandtabs()
        if time.perf_counter() - self._last_frame >= self.seconds_per_frame:
            self._draw()

    def _draw(self) -> None:
        width = max(shutil.get_terminal_size().columns - 1, 20)
        lines = []
        for row, (prompt, text) in enumerate(zip(self._prompts, self._texts, strict=True)):
            heading = textwrap.shorten(f"[{row + 1}] > {prompt}", width, placeholder="...")
            lines += [f"\x1b[1m{heading}\x1b[0m", *_wrap(text, width)[-self._lines_per_answer :], ""]
        back = f"\x1b[{self._height}A" if self._height else ""
        # Without automatic wrapping (7l) a line of wide characters stays one line, and the way back up right.
        frame = "".join(f"{line}\n" for line in lines)
        self._stream.write(f"{back}\r\x1b[J\x1b[?7l{frame}\x1b[?7h")
        self._stream.flush()
        self._height = len(lines)
        self._last_frame = time.perf_counter()


def format_table(rows: Sequence[tuple[str, str]]) -> str:
    """Lay names and values out in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; keeps line breaks, and blanks at the end that text may follow."""
    lines = []
    for paragraph in text.split("\n"):
        first, *others = textwrap.wrap(paragraph, width, drop_whitespace=False) or [""]
        lines += [first, *(line.lstrip(" ") for line in others)]
    return lines


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
