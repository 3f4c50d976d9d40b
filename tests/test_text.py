"""The text of the training program: what is read, what is refused, what its tokenizer makes of odd text."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the training program's packages")
pytest.importorskip("pydantic", reason="needs the training program's packages")

from tokenizers import pre_tokenizers

from training import text as module
from training.config import TextConfig
from training.refusal import Refusal
from training.text import load_text, read_documents, train_tokenizer

LATIN_1 = "ein schöner Tag, ".encode("latin-1") * 100


def _config(path, max_bytes=10_000, vocab_size=300, cache="unused") -> TextConfig:
    return TextConfig(path=str(path), max_bytes=max_bytes, vocab_size=vocab_size, cache=str(cache))


# --- what is read -------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [100, len(LATIN_1), 10_000], ids=["longer", "as long", "shorter"])
def test_a_file_that_is_not_utf8_is_refused_by_name_and_skipped_in_a_folder(max_bytes, tmp_path):
    (tmp_path / "latin-1.txt").write_bytes(LATIN_1)
    (tmp_path / "plain.txt").write_text("plain text")
    with pytest.raises(Refusal, match=r"latin-1\.txt is not UTF-8: byte 0xf6 at position 7$"):
        read_documents(_config(tmp_path / "latin-1.txt", max_bytes))
    assert read_documents(_config(tmp_path, max_bytes))[1] == ["plain text"]


def test_only_a_character_that_the_limit_splits_is_dropped(tmp_path):
    whole = "aé€😀b"
    path = tmp_path / "text"
    path.write_text(whole, encoding="utf-8")
    for max_bytes in range(1, len(whole.encode()) + 2):
        fitting = max((whole[:n] for n in range(6) if len(whole[:n].encode()) <= max_bytes), key=len)
        assert read_documents(_config(path, max_bytes))[1] == [fitting]
    path.write_bytes("naïve é".encode()[:-1])  # the file itself ends too early
    with pytest.raises(Refusal, match="byte 0xc3 at position 7$"):
        read_documents(_config(path))


def test_no_more_is_read_than_asked_for(tmp_path):
    path = tmp_path / "text"
    path.write_text("0123456789" * 10)
    assert read_documents(_config(path, 2**63 - 1))[1] == ["0123456789" * 10]
    os.truncate(path, 1 << 40)  # a hole: a terabyte that takes no room on the disk, and too much memory
    (tmp_path / "a").write_text("first")
    (tmp_path / "zzz").write_text("more")
    assert read_documents(_config(tmp_path, 25))[1] == ["first", "01234567890123456789"]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("plain text")
    (tmp_path / "link").symlink_to("text")
    (tmp_path / ".hidden").write_text("skipped")
    assert read_documents(_config(tmp_path))[1] == ["plain text"] * 2
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(Refusal, match=f"{path} is neither a file nor a folder"):
            read_documents(_config(path))


def test_torch_sources_come_after_the_standard_library(tmp_path, monkeypatch):
    for name in ("stdlib", "torch"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "tests" / "a.py").write_text("skipped")
        for letter in "ba":
            (tmp_path / name / f"{letter}.py").write_text(f"{name} {letter}")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "stdlib"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    config = TextConfig(torch_sources=True, vocab_size=300, max_bytes=1000)
    source, documents = read_documents(config)
    assert source == "the Python standard library's sources and PyTorch's"
    assert documents == ["stdlib a", "stdlib b", "torch a", "torch b"]
    assert read_documents(config.model_copy(update={"max_bytes": 21}))[1] == ["stdlib a", "stdlib b", "torch"]
    assert read_documents(config.model_copy(update={"torch_sources": False}))[1] == ["stdlib a", "stdlib b"]


# --- the tokenizer ------------------------------------------------------------------------------------


def _random_text(alphabet: str, length: int) -> str:
    return "".join(random.Random(0).choices(alphabet, k=length))


LONG = {
    "letter": "a" * 5000,
    "digit": "7" * 5000,
    "blank": " " * 5000 + "x",
    "mark": "-" * 5000,
    "line": "\n" * 5000,
    "wide": "漢😀" * 2500,
    "base64": _random_text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", 5000),
    "tabs": "\t " * 2500,
}
LONG["mixed"] = "\r\n\ufeff " + " 's it''s\u2028 \x1f é e\u0301 \u00a0 ".join(LONG.values()) + "\t"


@pytest.mark.parametrize("name", LONG)
def test_pieces_are_short_and_give_the_text_back(name):
    whole = LONG[name]
    tokenizer = train_tokenizer([whole], 400)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(whole)]
    assert "".join(whole[start:end] for start, end in spans) == whole
    assert max(end - start for start, end in spans) <= module.LONGEST + 1  # and the blank in front of a word
    assert tokenizer.decode(tokenizer.encode(whole).ids, skip_special_tokens=False) == whole


def test_common_text_is_cut_as_byte_level_does():
    text = "It's we've  cut,   as\tthey'll say: 3 x 1234 = 3702;\n\n    def f(x):\n        return x_1 != 'né' \n"
    plain = [span for _, span in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    assert [span for _, span in train_tokenizer([text], 300).pre_tokenizer.pre_tokenize_str(text)] == plain


@pytest.mark.parametrize("whole", ["a" * 200_000, _random_text("abcdefgh", 200_000)], ids=["one letter", "letters"])
def test_text_without_blanks_is_not_slow(whole):
    start = time.process_time()  # of all threads, whatever else the machine does
    train_tokenizer([whole], 16384)
    assert time.process_time() - start < 10  # one word of 200 kB takes minutes


def test_a_vocabulary_larger_than_any_memory():
    assert 257 < train_tokenizer(["a few words " * 50], 2**31 - 1).get_vocab_size() < 300


# --- the cache ----------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path) -> TextConfig:
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / name).write_text("a few words " * 50)
    return _config(tmp_path / "text", cache=tmp_path / "cache")


def test_documents_end_with_their_token(words):
    text = load_text(words)
    (ends,) = (text.tokens == text.end_of_document).nonzero()
    assert len(ends) == 2 and ends[0] == len(text.tokens) // 2 - 1 and ends[1] == len(text.tokens) - 1
    assert text.tokens.dtype.name == "int32" and text.tokens.max() < text.entries <= 300


def test_another_text_or_tokenizer_has_another_cache(words, monkeypatch):
    def files(**settings) -> int:
        load_text(words.model_copy(update=settings), said.append)
        return len([*Path(words.cache).iterdir()])

    said: list[str] = []
    assert files() == files() == 1 and len(said) == 1  # the second time from the cache
    assert files(vocab_size=301) == 2 and files(max_bytes=500) == 3
    monkeypatch.setattr(module, "PIECE", module.PIECE.replace(str(module.LONGEST), "3"))
    assert files() == 4 and len(said) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no such format"])
def test_a_damaged_file_of_the_cache_is_made_anew(damage, words):
    before = load_text(words)
    (file,) = Path(words.cache).iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes({"cut": whole[:-5], "changed": changed, "empty": b"", "no such format": b"{}\xff"}[damage])
    after = load_text(words)
    assert (after.tokens.tolist(), after.entries) == (before.tokens.tolist(), before.entries)
    said: list[str] = []
    load_text(words, said.append)
    assert not said


def test_no_text_is_refused(tmp_path):
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(Refusal, match="no text in .*blank"):
        load_text(_config(tmp_path / "blank"))
