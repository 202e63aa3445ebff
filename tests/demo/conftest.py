"""A trio of models of random weights, sealed as those that ship are."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from scripts import script

from ccq import shipped

TRIO = ("gla-pico", "gla-unit-pico", "ccq-gla-pico")


@pytest.fixture(scope="session")
def ship() -> ModuleType:
    """The script that makes what ships."""
    return script("runs/ship_pico.py")


def make_trio(root: Path, ship: ModuleType) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from ccq.model import CCQConfig, CCQForCausalLM

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        shipped.book()["stories"][:2],
        trainers.BpeTrainer(
            vocab_size=1000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    tokenizer.save_pretrained(root / shipped.TOKENIZER)
    for name in TRIO:
        torch.manual_seed(0)
        config = CCQConfig.preset(name.replace("pico", "tiny"), vocab_size=1000, eos_token_id=0)
        CCQForCausalLM(config).to(torch.bfloat16).save_pretrained(root / name)
        (root / name / "README.md").write_text(f"# {name}\n")
        ship.seal(root / name, steps=0)
    return root


@pytest.fixture(scope="session")
def trio(tmp_path_factory, ship) -> Path:
    return make_trio(tmp_path_factory.mktemp("shipped"), ship)


@pytest.fixture
def ships(trio, monkeypatch) -> Path:
    """The folder of the trio, which ships as far as `ccq` knows."""
    monkeypatch.setenv("CCQ_SHIPPED", str(trio))
    return trio


@pytest.fixture
def no_network(monkeypatch):
    """A machine without a network: every attempt to connect or to look a name up fails the test."""
    import socket

    def refuse(*_, **__):
        raise AssertionError("something asks for the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
