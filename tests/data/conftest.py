import numpy as np
import pytest
from data_helpers import write_shards


@pytest.fixture
def some_shards(tmp_path):
    """Three shards of 40 documents with 0 to 30 tokens; (folder, stream, ends)."""
    rng = np.random.default_rng(0)
    groups = [[rng.integers(1, 100, size=rng.integers(0, 31)).tolist() for _ in range(n)] for n in (17, 1, 22)]
    stream, ends = write_shards(tmp_path / "shards", groups)
    return tmp_path / "shards", stream, ends
