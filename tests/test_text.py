"""The text of the training program: what is read, what is refused, what its tokenizer makes of odd text."""

from __future__ import annotations

import os
import random
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


def test_what_is_read_of_a_folder_and_what_is_refused_as_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("plain")
    for name in ("plain", ".hidden"):
        (tmp_path / name).write_text("plain text")
    refused = {"blank": (b" \n", "no text in .*blank"), "fifo": (None, "fifo is neither a file nor a folder")}
    refused |= {"latin": (LATIN_1, r"latin is not UTF-8: byte 0xf6 at position 7$")}
    for name, (content, words) in refused.items():
        if content:
            (tmp_path / name).write_bytes(content)
        # Less than the file, as much, and more.
        for max_bytes in (100, len(LATIN_1), 10_000):
            with pytest.raises(Refusal, match=words):
                load_text(_config(tmp_path / name, max_bytes))
            assert read_documents(_config(tmp_path, max_bytes))[1] == ["plain text"] * 2


def test_no_more_is_read_than_asked_for(tmp_path):
    path, whole = tmp_path / "text", "aé€😀b"
    path.write_text(whole, encoding="utf-8")
    for max_bytes in range(1, len(whole.encode()) + 2):  # only a character that the limit splits is dropped
        fitting = max((whole[:n] for n in range(6) if len(whole[:n].encode()) <= max_bytes), key=len)
        assert read_documents(_config(path, max_bytes))[1] == [fitting]
    path.write_text("0123456789" * 10)
    assert read_documents(_config(path, 2**63 - 1))[1] == ["0123456789" * 10]
    os.truncate(path, 1 << 40)  # a hole: a terabyte that takes no room on the disk, and too much memory
    (tmp_path / "a").write_text("first")
    (tmp_path / "zzz").write_text("more")
    assert read_documents(_config(tmp_path, 25))[1] == ["first", "01234567890123456789"]


def test_torch_sources_come_after_the_standard_library(tmp_path, monkeypatch):
    for name in ("stdlib/a.py", "stdlib/tests/a.py", "torch/b.py", "torch/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "stdlib"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    for chosen, expected in ((True, ["stdlib/a.py", "torch/a.py", "torch/b.py"]), (False, ["stdlib/a.py"])):
        config = TextConfig(torch_sources=chosen, vocab_size=300, max_bytes=1000)
        assert read_documents(config)[1] == expected


LONG = ["a" * 5000, "7" * 5000, " " * 5000 + "x", "-" * 5000, "\n" * 5000, "漢😀" * 2500, "\t " * 2500]
LONG.append("".join(random.Random(0).choices("ABCabcxyz0123456789+/", k=5000)))


def test_pieces_are_short_and_give_the_text_back():
    """A BPE takes minutes for one word of 200 kB."""
    whole = "\r\n\ufeff " + " 's it''s\u2028 \x1f é e\u0301 \u00a0 ".join(LONG) + "\t"
    tokenizer = train_tokenizer([whole], 400)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(whole)]
    assert "".join(whole[start:end] for start, end in spans) == whole
    assert max(end - start for start, end in spans) <= module.LONGEST + 1  # and the blank in front of a word
    assert tokenizer.decode(tokenizer.encode(whole).ids, skip_special_tokens=False) == whole


def test_common_text_is_cut_as_byte_level_does():
    text = "It's we've  cut,   as\tthey'll say: 3 x 1234 = 3702;\n\n    def f(x):\n        return x_1 != 'né' \n"
    plain = [span for _, span in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
    assert [span for _, span in train_tokenizer([text], 300).pre_tokenizer.pre_tokenize_str(text)] == plain


def test_a_vocabulary_may_be_larger_than_any_memory():
    assert 257 < train_tokenizer(["a few words " * 50], 2**31 - 1).get_vocab_size() < 300


def test_the_cache_is_of_one_text_and_tokenizer_and_is_made_anew_where_it_is_damaged(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in "ab":
        (tmp_path / "text" / name).write_text("a few words " * 50)
    cache, said, texts = tmp_path / "cache", [], []

    def files(**settings) -> int:
        text = load_text(_config(tmp_path / "text", cache=cache, **settings), said.append)
        assert text.tokens.dtype.name == "int32" and text.tokens.max() < text.entries <= 301
        texts.append(text.tokens.tolist())
        return len([*cache.iterdir()])

    assert files() == files() == 1 and len(said) == 1  # the second time from the cache
    assert texts[0] == texts[1] == 2 * texts[0][: len(texts[0]) // 2]
    assert texts[0].count(0) == 2 and texts[0][-1] == 0  # documents end with their token
    (file,) = Path(cache).iterdir()
    whole = file.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-5], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], b""):
        file.write_bytes(damaged)
        assert files() == files() == 1 and texts[-1] == texts[-2] == texts[0]
    assert len(said) == 4
    assert files(vocab_size=301) == 2 and files(max_bytes=500) == 3
    monkeypatch.setattr(module, "PIECE", module.PIECE.replace(str(module.LONGEST), "3"))
    assert files() == 4 and len(said) == 7
