"""Real text without a download: reads it, trains a BPE on it, and keeps the token stream in a cache."""

import codecs
import hashlib
import importlib.util
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.config import TextConfig

T = TypeVar("T")
END_OF_DOCUMENT = "<|endoftext|>"
# Installed packages are not the standard library, and its tests are long tables rather than prose or programs.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"}

# The words of GPT-2's BPE, but of at most LONGEST characters. The time to train on a word grows with the square of its
# length: without the bound a long text without blanks would take hours. Longer words are rare in common text.
LONGEST = 32
_RUN = f"{{1,{LONGEST}}}"
PIECE = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}{_RUN}| ?\p{{N}}{_RUN}| ?[^\s\p{{L}}\p{{N}}]{_RUN}|\s{_RUN}(?!\S)|\s{_RUN}"


@dataclass
class Text:
    """A tokenized text. `tokens` is `[number of tokens]` int32; documents end with `end_of_document`."""

    tokens: np.ndarray
    end_of_document: int
    source: str
    entries: int  # of the vocabulary: those that the text could fill, at most the size in the configuration


def load_text(config: TextConfig, at_least: int, say: Callable[[str], None] = lambda line: None) -> Text:
    """The token stream of a text, from the cache if this text was tokenized with these settings before.

    Raises a ValueError if there are fewer than `at_least` tokens. `say` is called before each slow step, with a line
    that describes it.

    Cache files are written under another name and then renamed, so that a process that dies, or two that write at once,
    leave no unfinished file. A damaged file is written again.
    """
    source, documents = read_documents(config)
    size = sum(map(len, documents))
    if not size:
        raise ValueError(f"no text in {source}")
    name = _key(documents, config)
    cache = Path(config.cache)
    tokenizer_file, tokens_file = cache / f"{name}.tokenizer.json", cache / f"{name}.tokens.npy"
    tokenizer, tokens = _cached(tokenizer_file, _read_tokenizer), None
    if tokenizer is None:
        say(f"training a BPE of {config.vocab_size:,} entries on {size / 1e6:.1f} MB of text (once): {source}")
        tokenizer = _train_tokenizer(documents, config.vocab_size)
        _write(tokenizer_file, lambda path: tokenizer.save(str(path)))
    else:
        tokens = _cached(tokens_file, lambda path: _read_tokens(path, tokenizer.get_vocab_size()))
    end = _end_of_document(tokenizer)
    if tokens is None:
        say(f"tokenizing {size / 1e6:.1f} MB of text (once)")
        encoded = tokenizer.encode_batch_fast(documents, add_special_tokens=False)
        tokens = np.concatenate([np.array([*item.ids, end], dtype=np.int32) for item in encoded])
        _write(tokens_file, lambda path: np.save(path, tokens, allow_pickle=False))
    if len(tokens) < at_least:
        raise ValueError(f"{source} has {len(tokens)} tokens, fewer than the {at_least} of one sample")
    return Text(tokens, end, source, tokenizer.get_vocab_size())


def by_frequency(text: Text, rows: int, ranks: int) -> Text:
    """The text in the ids of a vocabulary of so many rows that is ordered by frequency, for tensor-parallel ranks."""
    from parallel_lce.vocabulary import VocabularyOrder

    tokens = torch.from_numpy(text.tokens)
    order = VocabularyOrder.by_frequency(torch.bincount(tokens, minlength=rows), ranks=ranks)
    end_of_document = int(order.new_id[text.end_of_document])
    return replace(text, tokens=order.apply(tokens).numpy(), end_of_document=end_of_document)


def _cached(path: Path, read: Callable[[Path], T]) -> T | None:
    """The content of a cache file, or None if the file is missing or damaged."""
    try:
        return read(path)
    except Exception:  # tokenizers raises no narrower class
        return None


def _read_tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    _end_of_document(tokenizer)
    return tokenizer


def _end_of_document(tokenizer: Tokenizer) -> int:
    token = tokenizer.token_to_id(END_OF_DOCUMENT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_DOCUMENT}")
    return token


def _read_tokens(path: Path, entries: int) -> np.ndarray:
    tokens = np.load(path, allow_pickle=False)
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not 0 <= tokens.min() <= tokens.max() < entries:
        raise ValueError(path)
    return tokens


def read_documents(config: TextConfig) -> tuple[str, list[str]]:
    """The name of the text's source, and its documents, up to `max_bytes` of UTF-8 in all. Those of a folder are sorted
    by path."""
    if config.path is None:
        source, roots = "the Python standard library's sources", [Path(sysconfig.get_path("stdlib"))]
        if config.torch_sources:
            source, roots = f"{source} and PyTorch's", [*roots, _folder_of("torch")]
        files = ((root, path) for root in roots for path in sorted(root.rglob("*.py")))
    else:
        root = Path(config.path)
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        if not root.is_file() and not root.is_dir():  # reading a pipe or a device might never end
            raise ValueError(f"{root} is neither a file nor a folder")
        source = str(root)
        files = ((root, path) for path in (sorted(root.rglob("*")) if root.is_dir() else [root]))
    return source, list(_read(files, config.max_bytes))


def _folder_of(package: str) -> Path:
    """Without importing the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"text.torch_sources: there is no package {package} here")
    return Path(found.origin).parent


def _read(files: Iterable[tuple[Path, Path]], left: int) -> Iterator[str]:
    """The documents in files, each given with the root that it was found under; `left` bytes of them at most."""
    for root, path in files:
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        data, cut = _read_at_most(path, left)
        try:  # a character that the cut has split is dropped
            document = codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
        except UnicodeDecodeError as error:
            if parts:
                continue  # not text
            raise ValueError(f"{path} is not UTF-8: byte {data[error.start]:#04x} at position {error.start}") from None
        if document.strip() and "\0" not in document:
            left -= len(data)
            yield document
        if left <= 0:
            return


def _read_at_most(path: Path, size: int) -> tuple[bytes, bool]:
    """The first `size` bytes of a file, and whether it has more."""
    with path.open("rb") as file:
        # read(size) allocates `size` bytes, however short the file is.
        data = file.read(min(size, os.fstat(file.fileno()).st_size))
        return data, bool(file.read(1))


def _key(documents: list[str], config: TextConfig) -> str:
    settings = {
        "vocab_size": config.vocab_size,
        "end": END_OF_DOCUMENT,
        "piece": PIECE,
        "tokenizers": tokenizers.__version__,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    most = 1 + len(alphabet) + sum(len(document.encode()) for document in documents)  # each merge joins two tokens
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, most),  # the trainer allocates this many entries at once
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
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
