"""Real text without a download: find it, train a BPE on it once, keep the token stream in a cache."""

import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.config import TextConfig

END_OF_DOCUMENT = "<|endoftext|>"
# Installed packages are not the standard library, and its tests are long tables rather than prose or programs.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"}


@dataclass
class Text:
    """A tokenized text. `tokens` is `[number of tokens]` int32; documents end with `end_of_document`."""

    tokens: np.ndarray
    end_of_document: int
    source: str
    entries: int  # of the vocabulary that the text could fill, at most the size asked for


def load_text(config: TextConfig, at_least: int, say: Callable[[str], None] = lambda line: None) -> Text:
    """The token stream of a text, from the cache if this text was tokenized with these settings before.

    Raises a ValueError if there are fewer than `at_least` tokens. `say` is told what takes time.

    Files are written under another name and renamed, so processes that race or die leave no half a file behind.
    """
    source, documents = read_documents(config)
    size = sum(map(len, documents))
    if not size:
        raise ValueError(f"no text in {source}")
    name = _key(documents, config)
    cache = Path(config.cache)
    tokenizer_file, tokens_file = cache / f"{name}.tokenizer.json", cache / f"{name}.tokens.npy"
    if tokenizer_file.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        say(f"training a BPE of {config.vocab_size:,} entries on {size / 1e6:.1f} MB of text (once): {source}")
        tokenizer = _train_tokenizer(documents, config.vocab_size)
        _write(tokenizer_file, lambda path: tokenizer.save(str(path)))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    if tokens_file.exists():
        tokens = np.load(tokens_file, allow_pickle=False)
    else:
        say(f"tokenizing {size / 1e6:.1f} MB of text (once)")
        encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        tokens = np.concatenate([np.array([*item.ids, end], dtype=np.int32) for item in encoded])
        _write(tokens_file, lambda path: np.save(path, tokens, allow_pickle=False))
    if len(tokens) < at_least:
        raise ValueError(f"{source} has {len(tokens)} tokens, fewer than the {at_least} of one sample")
    return Text(tokens, end, source, tokenizer.get_vocab_size())


def read_documents(config: TextConfig) -> tuple[str, list[str]]:
    """Where the text comes from, and its documents in the order of their names, up to `max_bytes` of UTF-8 in all."""
    if config.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        source, paths = "the Python standard library's sources", root.rglob("*.py")
    else:
        root = Path(config.path)
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        source, paths = str(root), root.rglob("*") if root.is_dir() else iter([root])
    return source, list(_read(root, paths, config.max_bytes))


def _read(root: Path, paths: Iterator[Path], left: int) -> Iterator[str]:
    for path in sorted(paths):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        data = path.read_bytes()[:left]
        try:  # the cut may have split a character: drop what is left of it
            document = data.decode("utf-8", errors="ignore" if len(data) == left else "strict")
        except UnicodeDecodeError:
            continue  # not text
        if document.strip() and "\0" not in document:
            left -= len(data)
            yield document
        if left <= 0:
            return


def _key(documents: list[str], config: TextConfig) -> str:
    settings = {"vocab_size": config.vocab_size, "end": END_OF_DOCUMENT, "tokenizers": tokenizers.__version__}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def _train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _write(path: Path, save: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        save(unfinished)
        os.replace(unfinished, path)
