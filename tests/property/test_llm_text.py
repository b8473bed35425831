"""Text as it streams: the same as decoding and cutting all of it at once, never half a character, never more held than need be."""

from __future__ import annotations

import codecs

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace_backends.llm.detokenizer import Detokenizer
from headrace_backends.llm.sampling_params import RepetitionDetection
from headrace_backends.llm.stop import StopStrings, repeats
from llm_fakes import PIECES, VOCAB, ByteTokenizer

TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=60)
WHOLE = st.lists(st.sampled_from([0, 1, 2, 3, 4, 7, 12]), max_size=6)
SHORT = st.text("ab€", min_size=1, max_size=5)


class Bytes:
    """One token for each byte, special ones after them."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        kept = bytes(token for token in token_ids if token < 256)
        return kept.decode(errors="replace")


@settings(deadline=None)
@given(WHOLE, TOKENS)
def test_increments_add_up_to_what_decoding_all_at_once_gives(prompt: list[int], tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, prompt)
    parts = [detokenizer.append(token) for token in tokens]
    parts.append(detokenizer.finish())
    assert "".join(parts) == tokenizer.decode(tokens, skip_special_tokens=True)


@settings(deadline=None)
@given(st.text(), st.integers(0, 3))
def test_each_character_is_told_by_the_token_that_completes_it(text: str, special: int) -> None:
    detokenizer = Detokenizer(Bytes(), [])
    if "\ufffd" in text:
        return
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.append(byte) for byte in first] == [""] * len(first)
        assert detokenizer.append(last) == character
        assert [detokenizer.append(256) for _ in range(special)] == [""] * special


@settings(deadline=None)
@given(st.lists(st.integers(0x80, 0xFF) | st.integers(0, 255), max_size=300))
def test_bytes_that_are_no_text_are_told_as_they_come(data: list[int]) -> None:
    detokenizer = Detokenizer(Bytes(), [])
    told = ""
    for count, byte in enumerate(data, 1):
        told += detokenizer.append(byte)
        assert len(detokenizer._window) <= 64
        known = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(bytes(data[:count]))
        assert known.startswith(told)
    assert told + detokenizer.finish() == bytes(data).decode(errors="replace")


@settings(deadline=None)
@given(st.lists(st.just(256) | st.just(97), max_size=200))
def test_tokens_without_text_do_not_gather(tokens: list[int]) -> None:
    detokenizer = Detokenizer(Bytes(), [97])
    told = ""
    for token in tokens:
        told += detokenizer.append(token)
        assert len(detokenizer._window) <= 64
    assert told + detokenizer.finish() == "a" * tokens.count(97)


def plainly(parts: list[str], stops: list[str], *, include: bool) -> tuple[str, str | None]:
    text = "".join(parts)
    found = [(text.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in text]
    if not found:
        return text, None
    end, order = min(found)
    return text[: end if include else end - len(stops[order])], stops[order]


@settings(deadline=None)
@given(st.lists(st.text("ab€", max_size=4), max_size=12), st.lists(SHORT, max_size=4), st.booleans())
@example(["aa", "ab"], ["aab"], False)
@example(["abababb"], ["ababb"], True)
def test_a_stream_ends_where_the_first_complete_stop_string_begins(
    parts: list[str], stops: list[str], include: bool
) -> None:
    stop = StopStrings(stops, include=include)
    told = ""
    matched = None
    for part in parts:
        matched = stop.append(part)
        told += stop.take()
        if matched is not None:
            break
    told += stop.take(final=True)
    assert (told, matched) == plainly(parts, stops, include=include)


@settings(deadline=None)
@given(st.lists(st.text("ab€", max_size=4), max_size=12), st.lists(SHORT, max_size=4))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(parts: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    text = told = ""
    for part in parts:
        text += part
        if stop.append(part) is not None:
            return
        told += stop.take()
        ends = [length for wanted in stops for length in range(1, len(wanted)) if text.endswith(wanted[:length])]
        assert text[len(told) :] == text[len(text) - max(ends, default=0) :]


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(SHORT, max_size=3), st.integers(0, 8))
def test_strings_completed_while_nothing_may_stop_end_nothing(parts: list[str], stops: list[str], until: int) -> None:
    stop = StopStrings(stops)
    text = ""
    for at, part in enumerate(parts):
        matched = stop.append(part, check=at >= until)
        ends = [len(text) + end for end in range(1, len(part) + 1)]
        text += part
        complete = [wanted for end in ends for wanted in stops if text[:end].endswith(wanted)]
        assert (matched is not None) == (at >= until and bool(complete))
        if matched is not None:
            return


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), max_size=24), st.integers(1, 4), st.integers(0, 3), st.integers(2, 4))
def test_repetition_is_the_end_made_of_one_pattern(tokens: list[int], low: int, more: int, count: int) -> None:
    rule = RepetitionDetection(min_pattern_size=low, max_pattern_size=low + more, min_count=count)
    plain = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(low, low + more + 1)
    )
    assert repeats(tokens, rule) is plain


def test_pieces_of_the_fake_have_parts_of_characters() -> None:
    assert any(not piece.decode(errors="ignore") for piece in PIECES if piece)


class Spaced:
    """Tokens with a space before each, as WordPiece's have; those from 100 on are special."""

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        words = [
            f"<{token}>" if token >= 100 else f"w{token}"
            for token in token_ids
            if token < 100 or not skip_special_tokens
        ]
        return "".join(f" {word}" for word in words)


def test_special_tokens_have_no_spaces_between_them_where_that_is_asked() -> None:
    def text(**options: bool) -> str:
        detokenizer = Detokenizer(Spaced(), [1], **options)
        return "".join(detokenizer.append(token) for token in [100, 101, 2, 102, 3, 4])

    joined = text(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined == " <100><101> w2 <102> w3 w4"
    assert text(skip_special_tokens=False) == " <100> <101> w2 <102> w3 w4"
    assert text(spaces_between_special_tokens=False) == " w2 w3 w4"
