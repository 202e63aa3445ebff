"""One folder of results of every kind, and the page made of it."""

import pytest
from made_results import make_everything


@pytest.fixture(scope="session")
def everything(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    make_everything(root)
    return root


@pytest.fixture(scope="session")
def report(everything, tmp_path_factory):
    """Folder of the page of everything."""
    from ccq.report.collect import collect
    from ccq.report.page import build

    out = tmp_path_factory.mktemp("report")
    build(collect([everything])).write(out)
    return out
