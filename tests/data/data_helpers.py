"""What the tests of the data share: shards of given documents, written without a tokenizer."""

import json

import numpy as np

from ccq.data import shards

EOS = 0


def write_shards(folder, groups, vocab_size=100, tokenizer="0" * 64):
    """One shard a group of documents (lists of ids without end-of-text); returns the stream and the documents' ends."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = shards.token_dtype(vocab_size)
    entries, stream, ends = [], [], []
    for number, documents in enumerate(groups):
        writer = shards.ShardWriter(folder / f"shard-{number:05d}.bin", tokenizer, dtype)
        for document in documents:
            writer.write(np.array([*document, EOS]))
            writer.end_document()
            stream += [*document, EOS]
            ends.append(len(stream))
        entries.append(writer.finish())
    index = {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "complete": True,
        "tokenizer": {"hash": tokenizer, "vocab_size": vocab_size, "eos_id": EOS},
        "dtype": dtype.name,
        "shards": entries,
        "tokens": len(stream),
        "documents": len(ends),
        "needle_documents": 0,
    }
    (folder / shards.INDEX).write_text(json.dumps(index))
    return np.array(stream), np.array(ends)


def some_text(documents=60, seed=0):
    """Documents of invented words, numbers and other scripts, some with awkward beginnings and ends."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefghilmnoprstuv"), size=rng.integers(1, 9))) for _ in range(400)]
    words += ["1924", "Straße", "日本語", "🦜", "naïve", "don't", "\n\n", "  ", "\t"]
    texts = []
    for _ in range(documents):
        sentences = [" ".join(rng.choice(words, size=rng.integers(3, 15))) for _ in range(rng.integers(1, 40))]
        texts.append(". ".join(s.capitalize() for s in sentences) + ".")
    return [*texts, " leading", "trailing \n", "\n", "x", "é" * 50, "a<|endoftext|>b"]
