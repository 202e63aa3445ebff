import json

import numpy as np
import pytest
from data_helpers import some_text, write_shards


@pytest.fixture
def some_shards(tmp_path):
    """Three shards of 40 documents with 0 to 30 tokens; (folder, stream, ends)."""
    rng = np.random.default_rng(0)
    groups = [[rng.integers(1, 100, size=rng.integers(0, 31)).tolist() for _ in range(n)] for n in (17, 1, 22)]
    stream, ends = write_shards(tmp_path / "shards", groups)
    return tmp_path / "shards", stream, ends


@pytest.fixture(scope="session")
def texts():
    return some_text()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts):
    """The texts as one JSONL file, ids a-0, b-1, a-2, ..., with empty documents between."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [{"id": f"{'ab'[n % 2]}-{n}", "text": text} for n, text in enumerate(texts)]
    rows[3:3] = [{"id": "a-empty", "text": ""}, {"id": "a-null", "text": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, corpus):
    from ccq.data.sources import Inputs
    from ccq.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    train_tokenizer(Inputs((corpus,)), vocab_size=500).save_pretrained(folder)
    return folder
