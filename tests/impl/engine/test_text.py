"""Incremental text: whole characters, cut stop strings, and no text that is withdrawn later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_support.models import make_llama_tokenizer, save_tokenizer
from tokenizers import Tokenizer

from blockstep.impl.engine import CheckpointError
from blockstep.impl.engine.detokenizer import Detokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def append_all(detokenizer: Detokenizer, tokens: Sequence[int]) -> str:
    return "".join(detokenizer.append(token) for token in tokens)


def feed(tokenizer: Tokenizer, text: str, *stop: str) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in tokenizer.encode(text).ids:
        pieces.append(detokenizer.append(token))
        if detokenizer.stopped:
            break
    return [*pieces, detokenizer.finish()], detokenizer


def test_pieces_join_to_the_whole_text(tokenizer: Tokenizer) -> None:
    pieces, _ = feed(tokenizer, "hello world")
    assert pieces == [*"hello world", ""]


def test_a_character_of_several_tokens_is_returned_whole(tokenizer: Tokenizer) -> None:
    pieces, _ = feed(tokenizer, "ä€😀")
    assert [piece for piece in pieces if piece] == ["ä", "€", "😀"]


def test_a_broken_character_is_returned_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    tokens = tokenizer.encode("a€").ids[:-1]
    assert append_all(detokenizer, tokens) == "a"
    assert detokenizer.finish() == tokenizer.decode(tokens)[1:]


def test_special_tokens_are_not_part_of_the_text(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ())
    assert append_all(detokenizer, [*tokenizer.encode("ab").ids, 1]) + detokenizer.finish() == "ab"


def test_a_possible_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    pieces, detokenizer = feed(tokenizer, "xENxEN", "END")
    assert pieces == ["x", "", "", "ENx", "", "", "EN"]
    assert not detokenizer.stopped


def test_a_stop_string_is_cut_off(tokenizer: Tokenizer) -> None:
    pieces, detokenizer = feed(tokenizer, "abENDcd", "END", "zzz")
    assert "".join(pieces) == "ab"
    assert detokenizer.stopped


def test_the_first_of_two_stop_strings_counts(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("dd", "bb"))
    assert append_all(detokenizer, tokenizer.encode("aabbccdd").ids) == "aa"
    assert append_all(detokenizer, tokenizer.encode("xx").ids) == ""
    assert detokenizer.finish() == ""


def test_a_stop_string_may_be_found_when_the_text_ends(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("\ufffd",))
    assert append_all(detokenizer, tokenizer.encode("ab€").ids[:-1]) + detokenizer.finish() == "ab"
    assert detokenizer.stopped


def test_a_text_continues_its_prompt() -> None:
    tokenizer = make_llama_tokenizer()
    prompt, tokens = tokenizer.encode("b a").ids, tokenizer.encode("a b").ids
    assert tokenizer.decode(tokens) == "a b"
    assert append_all(Detokenizer(tokenizer, (), prompt), tokens) == " a b"
    assert append_all(Detokenizer(tokenizer, (" a",), prompt), tokens) == ""
    assert append_all(Detokenizer(tokenizer, (), [1]), tokens) == "a b"
    assert append_all(Detokenizer(tokenizer, (), [1, *tokenizer.encode("€").ids]), tokens) == " a b"


def test_invalid_bytes_are_returned_and_do_not_end_the_text() -> None:
    tokenizer = make_llama_tokenizer()
    newline, byte, c, a = map(tokenizer.get_vocab().__getitem__, ("<0x0A>", "<0xE2>", "c", "▁a"))
    assert tokenizer.decode([newline, byte, c]) == "\ufffd\ufffdc"
    detokenizer = Detokenizer(tokenizer, ())
    assert append_all(detokenizer, [newline]) == "\n"
    assert append_all(detokenizer, [byte, c]) == "\ufffdc"
    assert append_all(detokenizer, [a, byte]) == " a"
    assert detokenizer.finish() == "\ufffd"


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    expected = tokenizer.encode("abcdef").ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode("abcdef").ids == expected


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_a_broken_tokenizer_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        load_tokenizer(tmp_path)
