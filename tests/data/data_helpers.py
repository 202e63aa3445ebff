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
    }
    (folder / shards.INDEX).write_text(json.dumps(index))
    return np.array(stream), np.array(ends)
