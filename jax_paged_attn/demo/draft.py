"""Drafts without a second model: a text often goes on as it did before (prompt lookup decoding)."""

from collections.abc import Iterable


class NgramDrafter:
    """Proposes that a text goes on as it did where it held its last tokens before.

    The longest match counts, of at most `longest` tokens, and among those the latest.
    """

    def __init__(self, tokens: Iterable[int], longest: int = 3):
        self._longest = longest
        self._text: list[int] = []
        # By n-gram, where in the text that begins which followed the latest of it.
        self._followed: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        end = len(self._text)
        for n in range(1, min(self._longest, end) + 1):
            self._followed[tuple(self._text[end - n :])] = end
        self._text.append(token)

    def propose(self, count: int) -> list[int]:
        """Propose the next `count` tokens, or none where nothing matches."""
        end = len(self._text)
        for n in range(min(self._longest, end), 0, -1):
            source = self._followed.get(tuple(self._text[end - n :]))
            if source is not None:
                drafts: list[int] = []
                for i in range(source, source + count):  # past its end, the text goes on with the drafts
                    drafts.append(self._text[i] if i < end else drafts[i - end])
                return drafts
        return []


def count_agreeing(drafts: list[int], picked: Iterable[int]) -> int:
    """Count the leading drafts that are what the model itself picks, one after the other."""
    agreeing = 0
    for draft, token in zip(drafts, picked, strict=False):
        if draft != token:
            break
        agreeing += 1
    return agreeing
