"""Where a generation's output ends: stop strings, and patterns that repeat without end. Pure.

Knows text and token ids alone; which tokens end a text is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_backends.llm.sampling_params import RepetitionDetection


class StopStrings:
    """Looks for stop strings in text as it comes, and holds back what may yet become one.

    One Knuth-Morris-Pratt automaton a string: its state is the longest end of the text that begins the string, so exactly
    the longest real match is held back, and the string that is complete first ends the text (ties: the first in the list).
    """

    def __init__(self, stop: Sequence[str] = (), *, include: bool = False) -> None:
        """No string is empty. `include` lets the text end with the stop string, so that nothing need be held back."""
        self._stop = tuple(stop)
        self._include = include
        self._fallbacks = [_fallbacks(string) for string in self._stop]
        self._states = [0] * len(self._stop)
        self._text = ""
        """What has not been taken."""
        self.matched: str | None = None

    def append(self, text: str, *, check: bool = True) -> str | None:
        """Take the next text; return the stop string that ends it. Those completed with `check` off end nothing."""
        if self.matched is not None:
            return self.matched
        if not self._stop:
            self._text += text
            return None
        for at, character in enumerate(text):
            completed = self._advance(character)
            if completed is not None and check:
                self._text += text[: at + 1]
                if not self._include:
                    self._text = self._text[: len(self._text) - len(completed)]
                self.matched = completed
                return completed
        self._text += text
        return None

    def take(self, *, final: bool = False) -> str:
        """Return the text that is certain; with `final`, all of it."""
        hold = 0 if final or self._include or self.matched is not None else max(self._states, default=0)
        cut = len(self._text) - hold
        taken, self._text = self._text[:cut], self._text[cut:]
        return taken

    def _advance(self, character: str) -> str | None:
        completed = None
        for which, string in enumerate(self._stop):
            state, fallbacks = self._states[which], self._fallbacks[which]
            while state and string[state] != character:
                state = fallbacks[state - 1]
            if string[state] == character:
                state += 1
            if state == len(string):
                state = fallbacks[-1]
                completed = completed or string
            self._states[which] = state
        return completed


def _fallbacks(string: str) -> list[int]:
    """Return, of each beginning of the string, the length of its longest proper end that begins the string too."""
    lengths = [0] * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = lengths[length - 1]
        if string[at] == string[length]:
            length += 1
        lengths[at] = length
    return lengths


def repeats(token_ids: Sequence[int], rule: RepetitionDetection) -> bool:
    """Tell whether the tokens end with one pattern of a size within the rule, as often as the rule says."""
    count = len(token_ids)
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        length = size * rule.min_count
        if length > count:
            return False
        if all(token_ids[at] == token_ids[at - size] for at in range(count - 1, count - length + size - 1, -1)):
            return True
    return False
