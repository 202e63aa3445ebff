"""The sources of batches that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ccq.data.batches import Source
from ccq.data.mad import MAD
from ccq.data.mqar import MQAR
from ccq.data.recall import Recall
from ccq.data.shards import TokenShards, read_index
from ccq.data.windows import TokenWindows
from ccq.train import RunError
from ccq.train.config import Config


def train_source(config: Config, checksums: bool = True) -> Source:
    """What to train on; `checksums` reads every byte of it once."""
    data = config.data
    if config.foreign and (data.source != "tokens" or data.reset):
        raise RunError("init: a model of transformers trains on whole windows of text: --data.source tokens, no reset")
    if data.source != "tokens":
        return recall_source(config, data.slices, "train")
    if data.path is None:
        raise RunError("data.path: expected a folder made by `ccq data prepare`, got none (--data.path DIR)")
    return windows_of(TokenShards(data.path, checksums=checksums), config, "data.path")


def valid_source(config: Config, checksums: bool = True) -> Source | None:
    data = config.data
    if data.source != "tokens":
        return recall_source(config, data.valid_slices, "valid") if data.valid_slices else None
    if data.valid_path is None:
        return None
    shards = TokenShards(data.valid_path, checksums=checksums)
    if data.path is not None and shards.tokenizer_hash != read_index(Path(data.path))["tokenizer"]["hash"]:
        raise RunError(f"data.valid_path: {data.valid_path} is of another tokenizer than {data.path}")
    return windows_of(shards, config, "data.valid_path")


def recall_vocabulary(config: Config) -> int:
    """The tokens that recall samples are made of."""
    vocabulary = config.data.recall_vocab_size or config.model.vocab_size
    if vocabulary > config.model.vocab_size:
        raise RunError(f"data.recall_vocab_size: expected up to {config.model.vocab_size}, got {vocabulary}")
    return vocabulary


def recall_source(config: Config, slices: tuple, split: str) -> Recall:
    data = config.data
    how: dict[str, Any] = {"seed": config.seed, "split": split, "vocab_size": recall_vocabulary(config)}
    try:
        if data.source == "mad":
            return MAD(data.batch, slices, noise=data.noise, **how)
        return MQAR(data.batch, slices, updates=data.updates, **how)
    except ValueError as error:
        raise RunError(f"data: {error}") from None


def windows_of(shards: TokenShards, config: Config, name: str) -> TokenWindows:
    if shards.vocab_size > config.model.vocab_size:
        raise RunError(
            f"{name}: its tokens have a vocabulary of {shards.vocab_size:,}, but model.vocab_size is "
            f"{config.model.vocab_size:,}: give --model.vocab-size {shards.vocab_size}, or prepare the text with a "
            "smaller tokenizer"
        )
    return TokenWindows(shards, config.data.length, config.data.batch, config.seed, config.data.reset)


def longest(config: Config) -> int:
    """Tokens of the longest sequence."""
    return config.data.length if config.data.source == "tokens" else max(s[0] for s in config.data.slices)


def accumulation(config: Config, ranks: int) -> int:
    """Micro-batches of a rank in a step: as few as `runtime.micro_batch` allows."""
    batch, micro = config.data.batch, config.runtime.micro_batch
    if batch % ranks:
        raise RunError(f"data.batch: {batch} sequences cannot be shared by {ranks} ranks: expected a multiple of them")
    share = batch // ranks
    if share > micro and share % micro:
        raise RunError(f"runtime.micro_batch: expected a divisor of the {share} sequences of a rank, got {micro}")
    return max(1, share // micro)
