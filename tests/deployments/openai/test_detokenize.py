import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from deployments.openai.contracts import load_tokenizer
from deployments.openai.detokenize import StopChecker, TokenTable, WindowDetokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
TOKENIZER = load_tokenizer(GOLDEN / "llada2_b32")
TABLE = TokenTable(TOKENIZER)
SPECIAL = sorted(TABLE.special_ids)

#: Text with many bytes per character: joined emoji, Hangul (also as jamo), Arabic, combining marks.
HEAVY = st.text(
    st.one_of(
        st.sampled_from(list("👨‍👩‍👧🏽🇩🇪é́ñ한국어ᄒ힣العربية‎‏\u0301\u200d")),
        st.characters(codec="utf-8"),
        st.sampled_from("ab \n"),
    )
)


def deltas(ids, table=TABLE):
    detokenizer = table.new_detokenizer()
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.finish()]


def test_golden_tokenizer_is_byte_level():
    assert TABLE.is_byte_level
    assert [TOKENIZER.convert_ids_to_tokens(i) for i in SPECIAL] == [
        "<|endoftext|>",
        "<|role_end|>",
        "<|startoftext|>",
        "<|mask|>",
    ]


@given(HEAVY)
def test_deltas_join_to_the_text_and_hold_incomplete_characters(text):
    ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    pieces = deltas(ids)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 520), max_size=60))
def test_any_ids_give_what_a_full_decode_gives(ids):
    """Invalid UTF-8, special tokens and ids that the tokenizer does not know."""
    expected = TOKENIZER.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(deltas(ids)) == expected


def test_special_tokens_give_no_text_even_within_a_character():
    euro = TOKENIZER.backend_tokenizer.encode("€", add_special_tokens=False).ids
    assert len(euro) == 3
    assert "".join(deltas([SPECIAL[1], euro[0], SPECIAL[0], *euro[1:], SPECIAL[3]])) == "€"


def test_added_tokens_with_characters_outside_the_byte_alphabet():
    backend = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backend.add_tokens(["<a tool>", "日本"])
    table = TokenTable(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = [backend.token_to_id("<a tool>"), backend.token_to_id("日本")]
    assert "".join(deltas(ids, table)) == backend.decode(ids) == "<a tool>日本"


# SentencePiece-like tokenizers


def sentencepiece_table():
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for token in ["▁", "▁Hello", "▁wor", "ld", "!", "▁a"]:
        vocab[token] = len(vocab)
    backend = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    table = TokenTable(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert not table.is_byte_level
    return table, vocab


def test_window_detokenizer_on_words_and_byte_fallback():
    table, vocab = sentencepiece_table()
    ids = [vocab["▁Hello"], vocab["▁wor"], vocab["ld"]]
    ids += [byte + 1 for byte in " 한👨‍👩‍👧".encode()] + [vocab["!"], vocab["▁a"]]
    pieces = deltas(ids, table)
    assert "".join(pieces) == table.backend.decode(ids) == "Hello world 한👨‍👩‍👧! a"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[0] == "Hello"


def test_window_detokenizer_keeps_the_space_after_a_prompt():
    table, vocab = sentencepiece_table()
    detokenizer = WindowDetokenizer(table, [vocab["▁Hello"]])
    assert detokenizer.push(vocab["▁wor"]) == " wor"


def test_window_detokenizer_does_not_hold_garbage_for_ever():
    table, _ = sentencepiece_table()
    detokenizer = table.new_detokenizer()
    assert any(detokenizer.push(0xE0 + 1) for _ in range(20))


# Stop strings


def reference(text, stop):
    """By definition: the stop string that completes first cuts, of several the longest."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text, False
    end, negative = min(ends)
    return text[: end + negative], True


def run(pieces, stop):
    checker = StopChecker(stop)
    shown = []
    for piece in pieces:
        shown.append(checker.feed(piece))
    if checker.stopped is None:
        shown.append(checker.finish())
    return shown, checker.stopped is not None


@settings(max_examples=500)
@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
@example("aababaabab", ["abab", "b" * 6], random.Random(1))
@example("aaab", ["aab"], random.Random(1))  # a partial match that ends inside another one
@example("abababb", ["ababb"], random.Random(1))
def test_stop_strings_in_any_chunking(text, stop, rng):
    pieces, rest = [], text
    while rest:
        size = rng.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    expected, stopped = reference(text, stop)
    shown, seen = run(pieces, stop)
    assert ("".join(shown), seen) == (expected, stopped)


def test_a_held_prefix_is_released_when_it_does_not_match():
    checker = StopChecker(["<end>"])
    assert [checker.feed(piece) for piece in ["a<", "en", "x<e", "nd"]] == ["a", "", "<enx", ""]
    assert checker.finish() == "<end"


def test_nothing_is_held_without_need():
    checker = StopChecker(["zz"])
    assert [checker.feed(piece) for piece in ["hello", " z", "o", "z"]] == ["hello", " ", "zo", ""]


def test_nothing_is_shown_after_a_stop():
    checker = StopChecker(["\n\n"])
    assert checker.feed("a\n\nb") == "a"
    assert (checker.feed("c"), checker.finish(), checker.stopped) == ("", "", "\n\n")


def test_work_is_linear_in_the_text(monkeypatch):
    """The worst case for naive matching: the text is nearly the stop string, again and again."""
    steps = 0
    original = StopChecker._advance

    def counted(self, i, char):
        nonlocal steps
        before = self._matched[i]
        matched = original(self, i, char)
        steps += 1 + max(0, before - matched)
        return matched

    monkeypatch.setattr(StopChecker, "_advance", counted)
    checker = StopChecker(["a" * 500 + "b"])
    text = ("a" * 499 + "c") * 40
    assert "".join([checker.feed(char) for char in text] + [checker.finish()]) == text
    assert steps <= 2 * len(text)


@given(HEAVY, st.lists(HEAVY.filter(lambda s: 1 <= len(s) <= 4), min_size=1, max_size=3))
def test_text_of_a_stream_is_the_text_of_the_whole(text, stop):
    """Through detokenizer and stop strings, token by token."""
    ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    shown, stopped = run(deltas(ids), stop)
    assert ("".join(shown), stopped) == reference(text, stop)


@pytest.mark.parametrize("stop", [[], [""]])
def test_no_stop_string_holds_nothing(stop):
    assert StopChecker(stop).feed("abc") == "abc"
