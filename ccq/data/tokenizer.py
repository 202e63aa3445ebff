"""The tokenizer: training a byte-level BPE, loading any fast one, and the hash that ties shards to it."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ccq.data import DataError
from ccq.data.sources import Inputs, Piece
from ccq.names import duration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    inputs: Inputs, vocab_size: int = 32_000, sample: int | None = None, say: Callable[[str], None] = lambda line: None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, the same for the same text on every machine. Any text is encoded and decoded without loss.

    sample   bytes of text to learn from: of each file a beginning in proportion to its size; None for all
    say      gets a line every few seconds: how far it is, and how long the rest of the text takes
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise DataError(f"vocab_size must be at least {len(alphabet) + 1} (bytes and {END_OF_TEXT}), got {vocab_size}")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)  # or others than frequent numbers would be cut unevenly
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    size = inputs.size() if sample is None else sample
    read = learned = 0  # of `size`, and bytes of text
    all_read = False

    def texts() -> Iterator[str]:
        nonlocal read, learned, all_read
        for piece in sampled(inputs, sample):
            learned += len(piece.text.encode(errors="replace"))
            read = piece.read if sample is None else learned
            yield repaired(piece.text)
        all_read = True

    def tell(seconds: float) -> None:
        if all_read:
            say(f"read {learned / 1e6:,.1f} MB of text; learning the merges, {duration(seconds)} since the start")
        elif size and read:
            say(f"read {read / size:.0%} of the text, {duration(seconds * (size / read - 1))} left; then the merges")
        else:
            say(f"read {learned / 1e6:,.1f} MB of text")

    interruptible(lambda: tokenizer.train_from_iterator(texts(), trainer), tell)
    if not learned:
        raise DataError("no text to learn from: no document is left" + (" after the filter" if inputs.filter else ""))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def interruptible(call: Callable[[], object], tell: Callable[[float], None]) -> None:
    """Run code that hears no Ctrl-C in a thread, so that who waits here does; `tell` gets the seconds since the start,
    soon and then every ten."""
    done: Future = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a daemon: the end of the process does not wait for it either
    begun = time.monotonic()
    try:
        while not wait([done], timeout=2 if time.monotonic() - begun < 2 else 10).done:
            tell(time.monotonic() - begun)
    except KeyboardInterrupt:
        atexit.register(os._exit, 130)  # beside the thread, which goes on, Python's own end would take seconds
        raise
    done.result()


def sampled(inputs: Inputs, sample: int | None) -> Iterator[Piece]:
    """The pieces of `inputs`, cut off file by file so that together they are at most `sample` bytes."""
    if sample is None:
        yield from inputs.pieces()
        return
    if inputs.dataset:
        yield from beginning(inputs.pieces(), sample)
        return
    files = inputs.files()
    total = max(sum(file.bytes for file in files), 1)
    for file in files:
        yield from beginning(inputs.of_file(file), sample * file.bytes // total)


def beginning(pieces: Iterator[Piece], size: int) -> Iterator[Piece]:
    """At most `size` bytes of them."""
    for piece in pieces:
        content = piece.text.encode(errors="surrogatepass")[:size]
        if content:
            yield piece._replace(text=content.decode(errors="ignore"))
        size -= len(content)
        if size <= 0:
            return


def repaired(text: str) -> str:
    """The text with half surrogate pairs, which JSON can hold and UTF-8 cannot, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Encoder:
    def __init__(self, tokenizer: str, dtype: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer, self.dtype = Tokenizer.from_str(tokenizer), np.dtype(dtype)
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of it

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # half surrogate pairs
            found = self.tokenizer.encode_batch_fast([repaired(t) for t in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in found]


def load_tokenizer(name: str | Path) -> Any:
    """That of a folder, a run, a model that ships or one of the Hub; a fast one with an end-of-text token."""
    from ccq import pretrained
    from ccq.shipped import ModelError

    try:
        tokenizer = pretrained.load_tokenizer(str(name))
    except ModelError as error:
        raise DataError(f"tokenizer {str(name)!r} cannot be loaded: {error}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(f"tokenizer {str(name)!r} is {type(tokenizer).__name__}: a fast one (tokenizers) is needed")
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {str(name)!r} has no end-of-text token (eos_token)")
    return tokenizer


def tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """What turns text into ids, without padding and truncation, which belong to a call."""
    fields = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(fields | {"padding": None, "truncation": None}, sort_keys=True)


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of `tokenizer_json`: two tokenizers with one hash give the same ids."""
    return hashlib.sha256(tokenizer_json(tokenizer).encode()).hexdigest()


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id."""
    return max(tokenizer.get_vocab().values()) + 1
