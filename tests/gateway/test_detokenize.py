"""Text out of tokens: whole characters, stop strings over borders, the same for every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import Delta, TextStream, Vocabulary
from shardline.wire.messages import TextBundle, Token


def vocabulary(pieces: list[bytes], special: tuple[int, ...] = (), eog: tuple[int, ...] = ()) -> Vocabulary:
    bundle = TextBundle(
        pieces=pieces,
        special=list(special),
        eog=list(eog),
        bos=None,
        eos=None,
        add_bos=False,
        chat_template=None,
        context_length=64,
    )
    return Vocabulary(bundle)


def deltas(pieces: list[bytes], stops: tuple[str, ...] = (), special: tuple[int, ...] = ()) -> list[Delta]:
    """One Delta a piece, then the last one; ends at the stop as a generation does."""
    stream = TextStream(vocabulary(pieces, special), stops)
    out = []
    for index in range(len(pieces)):
        out.append(stream.push(Token(id=index, index=index)))
        if stream.stopped:
            return out
    out.append(stream.finish())
    return out


def text_of(pieces: list[bytes], stops: tuple[str, ...] = ()) -> str:
    return "".join(delta.text for delta in deltas(pieces, stops))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xe6\xad", b"\xaa"], ["", "歪", ""]),
        ([b"\xf0\x9f", b"\x98", b"\x80"], ["", "", "😀", ""]),
        ([b"a\xc3", b"\xbcb"], ["a", "üb", ""]),
        ([b"\xe6", b"x"], ["", "\ufffdx", ""]),
        ([b"\xff", b"x"], ["\ufffd", "x", ""]),
        ([b"\xf0\x80", b"x"], ["\ufffd\ufffd", "x", ""]),
        ([b"\xed\xa0", b"x"], ["", "\ufffd\ufffdx", ""]),
        ([b"\xe6\xad"], ["", "\ufffd"]),
    ],
)
def test_characters_are_never_split(pieces: list[bytes], expected: list[str]) -> None:
    assert [delta.text for delta in deltas(pieces)] == expected


def test_stop_string_over_several_tokens() -> None:
    out = deltas([b"alpha", b" beta", b" gam", b"ma delta"], ("beta gamma",))
    assert [delta.text for delta in out] == ["alpha", " ", "", ""]
    assert out[-1].stopped


@pytest.mark.parametrize(
    ("piece", "stops", "expected"),
    [
        (b"xxENDyy", ("END", "EN"), "xx"),
        (b"xxENDyy", ("EN", "END"), "xx"),
        (b"Mars?\nBob", ("?\n",), "Mars"),
        (b"abcd", ("abcd", "bc"), "a"),
        (b"aab", ("ab",), "a"),
        ("aüb".encode(), ("ü",), "a"),
        (b"none", ("xyz",), "none"),
    ],
)
def test_the_cut_is_at_the_stop_that_is_complete_first(piece: bytes, stops: tuple[str, ...], expected: str) -> None:
    assert text_of([piece], stops) == expected
    assert text_of([bytes([b]) for b in piece], stops) == expected


def test_only_what_may_become_a_stop_is_held_back() -> None:
    out = [delta.text for delta in deltas([b"one <", b"br", b"><|", b"end", b"x|>"], ("<|end|>",))]
    assert out == ["one ", "<br", ">", "", "<|endx|>", ""]


def test_what_was_held_comes_at_the_end() -> None:
    assert text_of([b"wait <|en"], ("<|end|>",)) == "wait <|en"


def test_replacement_marks_count_for_stop_strings_too() -> None:
    out = deltas([b"a\xe6"], ("\ufffd",))
    assert "".join(delta.text for delta in out) == "a"
    assert out[-1].stopped


def test_control_tokens_are_never_shown() -> None:
    out = deltas([b"a", b"<|im_end|>", b"b"], special=(1,))
    assert "".join(delta.text for delta in out) == "ab"
    assert [shown.token.id for delta in out for shown in delta.tokens] == [0, 1, 2]


def test_a_control_token_does_not_complete_a_character() -> None:
    assert [d.text for d in deltas([b"\xe6\xad", b"<s>", b"\xaa"], special=(1,))] == ["", "", "歪", ""]


@pytest.mark.parametrize("token", [-1, 3, 2**31])
def test_a_foreign_id_ends_the_session_not_the_gateway(token: int) -> None:
    stream = TextStream(vocabulary([b"a", b"b", b"c"]))
    with pytest.raises(ShardlineError) as caught:
        stream.push(Token(id=token, index=0))
    assert caught.value.code == "engine_error"


def test_tokens_come_with_their_text() -> None:
    """A token is given out with the last character of its text, and not at all past the cut."""
    out = deltas([b"ab", b"c", b"STO", b"P!", b"x"], ("STOP",))
    assert [[shown.token.id for shown in delta.tokens] for delta in out] == [[0], [1], [], []]
    out = deltas([b"a", b"bS", b"TOP"], ("STOP",))
    assert [[shown.token.id for shown in delta.tokens] for delta in out] == [[0], [], [1]]
    out = deltas([b"\xe6\xad", b"\xaa"])
    assert [[(s.token.id, s.start) for s in delta.tokens] for delta in out] == [[], [(0, 0), (1, 0)], []]


STOPS = st.lists(st.text("ab歪😀\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)
RAW = st.one_of(
    st.binary(max_size=24),
    st.text("ab歪😀ü", max_size=12).map(str.encode),
    st.text("ab歪", max_size=8).map(lambda text: text.encode()[:-1]),
)


def reference(raw: bytes, stops: tuple[str, ...]) -> str:
    text = raw.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@given(raw=RAW, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
@example(raw=b"abaab", stops=("abaab", "ba"), cuts=[1, 2, 3, 4])
def test_every_split_gives_the_same_text(raw: bytes, stops: tuple[str, ...], cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(borders)]
    assert text_of(pieces, stops) == reference(raw, stops)


def may_become_a_character(tail: bytes) -> bool:
    for count in (1, 2, 3):
        for rest in itertools.product((0x80, 0x90, 0x9F, 0xA0, 0xBF), repeat=count):
            try:
                if len((tail + bytes(rest)).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def shown_so_far(known: bytes, stops: tuple[str, ...]) -> str:
    """All that can be known, less a possible beginning of a stop string."""
    open_bytes = next((n for n in (3, 2, 1) if len(known) >= n and may_become_a_character(known[-n:])), 0)
    text = known[: len(known) - open_bytes].decode("utf-8", "replace")
    held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
    return text[: len(text) - held]


# The decoder keeps the bytes of a surrogate for one byte longer than it must.
@given(raw=RAW.filter(lambda raw: b"\xed" not in raw), stops=STOPS)
def test_nothing_is_held_back_without_need(raw: bytes, stops: tuple[str, ...]) -> None:
    stream = TextStream(vocabulary([bytes([b]) for b in raw]), stops)
    out = ""
    for index in range(len(raw)):
        out += stream.push(Token(id=index, index=index)).text
        if stream.stopped:
            return
        assert out == shown_so_far(raw[: index + 1], stops)


@given(raw=RAW, stops=STOPS)
def test_every_token_that_has_shown_text_is_given_out_once_and_in_order(raw: bytes, stops: tuple[str, ...]) -> None:
    out = deltas([bytes([b]) for b in raw], stops)
    ids = [shown.token.id for delta in out for shown in delta.tokens]
    assert ids == list(range(len(ids)))
    if not any(delta.stopped for delta in out):
        assert len(ids) == len(raw)
