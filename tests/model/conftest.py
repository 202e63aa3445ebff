from __future__ import annotations

import pytest
from fla_checkpoints import make_folder


@pytest.fixture
def source(tmp_path):
    """A function that makes the folder of a checkpoint of fla's."""
    return lambda model_type, tensors=None, **changes: make_folder(tmp_path / "fla", model_type, tensors, **changes)
