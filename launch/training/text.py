"""Real text without a download: reads it, trains a BPE on it, keeps the token stream in a cache, and draws batches."""

import codecs
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from training.config import TextConfig, TrainConfig
from training.refusal import Refusal

END_OF_DOCUMENT = 0  # the id of the special token, which the BPE gets first
# Installed packages are not the standard library, and its tests are long tables rather than prose or programs.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "node_modules", "site-packages", "test", "tests"}


@dataclass
class Text:
    """A tokenized text."""

    tokens: np.ndarray  # [number of tokens] int32
    end_of_document: int  # the last token of each document
    source: str


def load_text(config: TextConfig) -> Text:
    """The token stream of a text, from the cache if this text was tokenized with these settings before, else with a
    line printed before the slow steps. Raises a Refusal for a text that cannot be read."""
    source, documents = read_documents(config)
    if not documents:
        raise Refusal(f"no file with text at {source}")
    cache = Path(config.cache, f"{_key(documents, config)}.npy")
    try:
        return Text(np.load(cache, allow_pickle=False), END_OF_DOCUMENT, source)
    except (OSError, ValueError, EOFError):  # missing, or damaged
        size = sum(map(len, documents)) / 1e6
        print(f"training a BPE of {config.vocab_size:,} entries on {size:.1f} MB of text (once): {source}", flush=True)
    encoded = train_tokenizer(documents, config.vocab_size).encode_batch_fast(documents, add_special_tokens=False)
    tokens = np.concatenate([np.array([*item.ids, END_OF_DOCUMENT], dtype=np.int32) for item in encoded])
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Under another name first: a process that dies, or two that write at once, leave no unfinished file.
    with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
        np.save(Path(folder, cache.name), tokens)
        os.replace(Path(folder, cache.name), cache)
    return Text(tokens, END_OF_DOCUMENT, source)


def by_frequency(text: Text, rows: int, ranks: int) -> Text:
    """The text in the ids of a vocabulary of so many rows, ordered by frequency for tensor-parallel ranks as by the
    recipe of docs/gradient_filter.md."""
    tokens = torch.from_numpy(text.tokens)
    counts = torch.bincount(tokens, minlength=rows)
    dealt = torch.argsort(torch.arange(len(counts)) % (rows // ranks), stable=True)
    new_id = torch.empty_like(dealt)
    new_id[torch.argsort(counts, descending=True, stable=True)] = dealt
    return replace(text, tokens=new_id[tokens].int().numpy(), end_of_document=int(new_id[text.end_of_document]))


def read_documents(config: TextConfig) -> tuple[str, list[str]]:
    """The name of the text's source, and its documents, up to `max_bytes` of UTF-8 in all."""
    if config.path is None:
        source, roots = "the Python standard library's sources", [Path(sysconfig.get_path("stdlib"))]
        if config.torch_sources:
            source, roots = f"{source} and PyTorch's", [*roots, Path(torch.__file__).parent]
        pattern = "*.py"
    else:
        source, roots, pattern = config.path, [Path(config.path)], "*"
    files = ((root, path) for root in roots for path in (sorted(root.rglob(pattern)) if root.is_dir() else [root]))
    try:
        return source, list(_read(files, config.max_bytes))
    except OSError as error:
        raise Refusal(f"{source} cannot be read: {error}") from None


def _read(files: Iterable[tuple[Path, Path]], left: int) -> Iterator[str]:
    """The documents in files, each given with the root that it was found under; `left` bytes of them at most. What is
    not UTF-8 is left out."""
    for root, path in files:
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        with path.open("rb") as file:
            data = file.read(left)
        try:  # a character that the limit splits is dropped
            document = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < left)
        except UnicodeDecodeError:
            continue
        if document.strip() and "\0" not in document:
            left -= len(data)
            yield document
        if left <= 0:
            return


def _key(documents: list[str], config: TextConfig) -> str:
    """A digest of the documents and of all settings that decide their tokens."""
    digest = hashlib.sha256(f"{config.vocab_size} {tokenizers.__version__}".encode())
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """A BPE of bytes within the words of GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@dataclass
class Batch:
    """One micro batch of `b` samples of `s` tokens, the same on every tensor-parallel rank."""

    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64, the next tokens
    loss_mask: torch.Tensor  # [b, s] float32, 0 where the label is the first token of another document
    position_ids: torch.Tensor  # [b, s] int64

    def sum_loss(self, per_token: torch.Tensor) -> torch.Tensor:
        """The sum of `per_token` [b, s] over the tokens that count, as a scalar."""
        return (per_token * self.loss_mask).sum()


class Batches:
    """Random windows of a text. The seed and the step determine a step's windows: there is no state to restore."""

    def __init__(self, text: Text, config: TrainConfig, device: torch.device):
        self.text, self.config, self.device = text, config, device

    def of_rank(self, step: int, data_rank: int, data_size: int) -> list[Batch]:
        """The micro batches of one data-parallel rank: its share of the step's samples."""
        config = self.config
        samples = self.samples(step, data_size * config.micro_batches * config.micro_batch)
        if config.sample_order:
            generator = torch.Generator().manual_seed(config.sample_order)
            samples = samples[torch.randperm(len(samples), generator=generator)]
        return [self.batch_of(part) for part in samples.chunk(data_size)[data_rank].split(config.micro_batch)]

    def samples(self, step: int, samples: int) -> torch.Tensor:
        """[samples, s + 1]"""
        stream, sequence = torch.from_numpy(self.text.tokens), self.config.sequence
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        starts = torch.randint(len(stream) - sequence, (samples,), generator=generator)
        return stream[starts[:, None] + torch.arange(sequence + 1)]

    def batch_of(self, samples: torch.Tensor) -> Batch:
        """The batch of samples [b, s + 1], on the device."""
        samples = samples.to(self.device, torch.int64)
        tokens, labels = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        return Batch(
            tokens=tokens,
            labels=labels,
            loss_mask=(tokens != self.text.end_of_document).float(),
            position_ids=torch.arange(tokens.shape[1], device=self.device).expand_as(tokens),
        )


def split(text: Text, sequence: int, samples: int) -> tuple[torch.Tensor, Text]:
    """Held-out samples [samples, sequence + 1] int64, spread evenly over the text, and the text without them. The text
    has at least `(samples + 1) * (sequence + 1)` tokens: they do not overlap, and a window is left."""
    starts = np.linspace(0, len(text.tokens) - sequence - 1, samples).astype(np.int64)
    places = starts[:, None] + np.arange(sequence + 1)
    held_out = torch.from_numpy(text.tokens[places]).long()
    return held_out, replace(text, tokens=np.delete(text.tokens, places))
