"""docs/assumptions.md: what it says of defaults holds, and the files it names are there."""

import inspect
import re
from pathlib import Path

import pytest

from ccq.data.prepare import Preparation
from ccq.data.tokenizer import END_OF_TEXT, train_tokenizer
from ccq.evaluate import Options, harness, longbench, niah
from ccq.model import CCQConfig
from ccq.ops.precision import EPS
from ccq.recipes import recipe
from ccq.report.results import SEEDS
from ccq.train.config import Data, Optimizer

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "assumptions.md").read_text()
NAMES = {
    "default": lambda function, name: inspect.signature(function).parameters[name].default,
    "preset": CCQConfig.preset,
    **{each.__name__: each for each in (Preparation, train_tokenizer, Options, CCQConfig, recipe, Data, Optimizer)},
    "END_OF_TEXT": END_OF_TEXT,
    "EPS": EPS,
    "SEEDS": SEEDS,
    "harness": harness,
    "longbench": longbench,
    "niah": niah,
}
EQUATIONS = re.findall(r"`([^`]+ == [^`]+)`", TEXT)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_an_equation_holds(equation):
    assert eval(equation.replace("\\|", "|"), {**NAMES}), equation


def test_there_are_many_and_each_table_has_some():
    assert len(EQUATIONS) > 30
    for section in TEXT.split("\n## ")[1:5]:
        assert " == " in section, section.splitlines()[0]


def test_files_that_are_named_are_there():
    named = set(re.findall(r"`((?:ccq|runs|docs)/[\w/.]+|constraints.txt)`", TEXT))
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name


def test_weights_of_convolutions_start_as_the_page_says():
    import torch

    from ccq.mixers.conv import ShortConv

    torch.manual_seed(0)
    assert ShortConv(512, 4).weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_where_decay_alone_takes_the_gate():
    """0.43 and 0.47, as the page says, from the settings of the recipes."""
    from ccq.train.optimizer import pure_decay

    for size, told in (("500m", "0.43 (500M)"), ("1.3b", "0.47 (1.3B)")):
        end = float(pure_decay(recipe(f"ccq_gla_{size}"))[-1])
        assert f"{end:.2f} ({size.upper()})" == told
        assert told in TEXT
