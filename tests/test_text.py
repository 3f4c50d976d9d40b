"""The text of the training program: what is read, what is refused, what its tokenizer makes of odd text."""

from __future__ import annotations

import io
import os
import random
import time

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="needs the training program's packages")
pytest.importorskip("pydantic", reason="needs the training program's packages")

from tokenizers import Tokenizer, models, pre_tokenizers

from training import text as module
from training.config import TextConfig
from training.text import load_text, read_documents

LATIN_1 = "ein schöner Tag, ".encode("latin-1") * 100


def npy(tokens: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, tokens)
    return file.getvalue()


def _config(path, max_bytes=10_000, vocab_size=300, cache="unused") -> TextConfig:
    return TextConfig(path=str(path), max_bytes=max_bytes, vocab_size=vocab_size, cache=str(cache))


@pytest.mark.parametrize("max_bytes", [100, len(LATIN_1), 10_000], ids=["longer", "as long", "shorter"])
def test_a_named_file_that_is_not_utf8_is_refused(max_bytes, tmp_path):
    path = tmp_path / "latin-1.txt"
    path.write_bytes(LATIN_1)
    with pytest.raises(ValueError, match=r"latin-1\.txt is not UTF-8: byte 0xf6 at position 7$"):
        read_documents(_config(path, max_bytes))


@pytest.mark.parametrize("max_bytes", [100, 10_000], ids=["longer", "shorter"])
def test_a_file_that_is_not_utf8_is_skipped_in_a_folder(max_bytes, tmp_path):
    (tmp_path / "a.txt").write_bytes(LATIN_1)
    (tmp_path / "b.txt").write_text("plain text")
    assert read_documents(_config(tmp_path, max_bytes))[1] == ["plain text"]


def test_the_last_character_of_a_file_that_ends_too_early_is_no_cut(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("naïve é".encode()[:-1])
    with pytest.raises(ValueError, match="byte 0xc3 at position 7$"):
        read_documents(_config(path))


def test_only_a_character_that_the_cut_splits_is_dropped(tmp_path):
    whole = "aé€😀b"
    path = tmp_path / "text"
    path.write_text(whole, encoding="utf-8")
    for max_bytes in range(1, len(whole.encode()) + 2):
        fitting = max((whole[:n] for n in range(6) if len(whole[:n].encode()) <= max_bytes), key=len)
        assert read_documents(_config(path, max_bytes))[1] == [fitting]


def test_no_more_is_read_than_asked_for(tmp_path):
    path = tmp_path / "text"
    path.write_text("0123456789" * 10)
    assert read_documents(_config(path, 2**63 - 1))[1] == ["0123456789" * 10]
    os.truncate(path, 1 << 40)  # a hole: a terabyte that takes no room on the disk, and too much memory
    assert read_documents(_config(path, 25))[1] == ["0123456789012345678901234"]
    (tmp_path / "zzz").write_text("more")
    assert read_documents(_config(tmp_path, 25))[1] == ["0123456789012345678901234"]


def test_the_bytes_of_a_folder_are_counted_together(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 10)
    assert read_documents(_config(tmp_path, 15))[1] == ["a" * 10, "b" * 5]


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "text").write_text("plain text")
    (tmp_path / "link").symlink_to("text")
    assert read_documents(_config(tmp_path))[1] == ["plain text"] * 2
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ValueError, match=f"{path} is neither a file nor a folder"):
            read_documents(_config(path))
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "none", tmp_path / "loop", "a\0b"):
        with pytest.raises(ValueError, match="no such file or folder"):
            read_documents(_config(path))


def _pieces(text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in module._pre_tokenizer().pre_tokenize_str(text)]


def _random_text(alphabet: str, length: int) -> str:
    return "".join(random.Random(0).choices(alphabet, k=length))


BASE_64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LONG = {
    "letter": "a" * 5000,
    "digit": "7" * 5000,
    "blank": " " * 5000 + "x",
    "mark": "-" * 5000,
    "line": "\n" * 5000,
    "wide": "漢😀" * 2500,
    "word": "word" * 1250,
    "base64": _random_text(BASE_64, 5000),
    "tabs": "\t " * 2500,
}


@pytest.mark.parametrize("name", LONG)
def test_a_pre_token_is_short(name):
    pieces = _pieces(LONG[name])
    assert "".join(pieces) == LONG[name]
    assert max(map(len, pieces)) <= module.LONGEST + 1  # and the blank in front of a word


def test_common_text_is_cut_as_byte_level_does():
    text = "It's we've  cut,   as\tthey'll say: 3 x 1234 = 3702;\n\n    def f(x):\n        return x_1 != 'né' \n"
    plain = [span for _, span in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    assert [span for _, span in module._pre_tokenizer().pre_tokenize_str(text)] == plain


@pytest.mark.parametrize("name", [*LONG, "mixed"])
def test_decoding_gives_the_text_back(name, tmp_path):
    whole = (
        "x" + LONG[name]
        if name in LONG
        else "\r\n\ufeff " + " 's it''s\u2028 \x1f é e\u0301 \u00a0 ".join(LONG.values()) + "\t"
    )
    path = tmp_path / "text"
    path.write_bytes(whole.encode())
    text = load_text(_config(path, 10**6, vocab_size=400, cache=tmp_path), 2)
    tokenizer = Tokenizer.from_file(str(next(tmp_path.glob("*.tokenizer.json"))))
    assert text.tokens[-1] == text.end_of_document
    assert tokenizer.decode(text.tokens[:-1].tolist(), skip_special_tokens=False) == whole


@pytest.mark.parametrize("whole", ["a" * 200_000, _random_text("abcdefgh", 200_000)], ids=["one letter", "letters"])
def test_text_without_blanks_is_not_slow(whole, tmp_path):
    path = tmp_path / "text"
    path.write_text(whole)
    start = time.process_time()  # of all threads, whatever else the machine does
    load_text(_config(path, 10**6, vocab_size=16384, cache=tmp_path), 2)
    assert time.process_time() - start < 10  # one word of 200 kB takes minutes


def test_another_tokenizer_has_another_cache(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("a few words " * 50)

    def files(**settings) -> set[str]:
        load_text(_config(path, cache=tmp_path / "cache", **settings), 2)
        return {file.name for file in (tmp_path / "cache").iterdir()}

    assert len(files()) == len(files()) == 2  # a tokenizer and its tokens, the second time from the cache
    assert len(files(vocab_size=301)) == 4
    monkeypatch.setattr(module, "PIECE", module.PIECE.replace(str(module.LONGEST), "3"))
    assert len(files()) == 6


DAMAGE = {
    "empty": b"",
    "no such format": b"{}\xff",
    "a list": b"[]",
    "another tokenizer": Tokenizer(models.BPE()).to_str().encode(),
    "tokens of another size": npy(np.arange(10)),
    "numbers that are no tokens": npy(np.array([5, 300], np.int32)),
    "negative": npy(np.array([-1], np.int32)),
    "no tokens": npy(np.zeros(0, np.int32)),
}


@pytest.mark.parametrize("damage", ["cut", *DAMAGE])
@pytest.mark.parametrize("suffix", ["tokenizer.json", "tokens.npy"])
def test_a_damaged_file_of_the_cache_is_made_anew(suffix, damage, tmp_path):
    path = tmp_path / "text"
    path.write_text("a few words " * 50)
    config = _config(path, cache=tmp_path / "cache")
    before = load_text(config, 2)
    (file,) = (tmp_path / "cache").glob(f"*.{suffix}")
    whole = file.read_bytes()
    file.write_bytes(DAMAGE.get(damage, whole[:-5]))
    after = load_text(config, 2)
    assert file.read_bytes() == whole
    assert (after.tokens.tolist(), after.entries) == (before.tokens.tolist(), before.entries)


def test_a_vocabulary_larger_than_any_memory(tmp_path):
    path = tmp_path / "text"
    path.write_text("a few words " * 50)
    assert 257 < load_text(_config(path, vocab_size=2**31 - 1, cache=tmp_path), 2).entries < 300
