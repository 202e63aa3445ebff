"""The tokenizer: nothing is lost, digits stand alone, and the same text gives the same tokenizer."""

import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ccq.data import DataError, sources
from ccq.data.sources import Inputs
from ccq.data.tokenizer import (
    END_OF_TEXT,
    Encoder,
    load_tokenizer,
    sampled,
    tokenizer_hash,
    tokenizer_json,
    train_tokenizer,
    vocabulary,
)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer_json(tokenizer), "<u2")


@given(st.text())
@example("a<|endoftext|>b")
@example(" \r\n\t  x")
def test_any_text_survives(tokenizer, encoder, text):
    ids, empty, again = encoder([text, "", text])
    assert len(empty) == 0
    assert tokenizer.decode(ids) == text
    assert ids.tolist() == again.tolist()
    assert tokenizer.eos_token_id not in ids


def test_half_surrogate_pairs_become_the_replacement_character(tokenizer, encoder):
    ids = np.concatenate(encoder(["a\ud800b", "c"]))
    assert tokenizer.decode(ids) == "a\ufffdbc"


@given(
    st.lists(st.sampled_from(["a", "un", "It's", "12", "é.", "日", "(x)"]), min_size=40, max_size=40),
    st.lists(st.sampled_from([" ", "  ", "\n", " \n\n", "\t "]), min_size=40, max_size=40),
    st.integers(8, 40),
)
def test_pieces_have_the_tokens_of_the_whole(encoder, words, spaces, size):
    text = "".join(space + word for space, word in zip(spaces, words, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", size)
        pieces = [p.text for p in sources.in_pieces("", [(text, 0)], sources.BEGINNING)]
    assert "".join(pieces) == text
    assert len(pieces) >= len(text) / size
    assert np.concatenate(encoder(pieces)).tolist() == encoder([text])[0].tolist()


def test_digits_stand_alone(tmp_path):
    (tmp_path / "years.txt").write_text("in 1924, " * 50)
    tokenizer = train_tokenizer(Inputs((tmp_path,)), 300)
    assert tokenizer.tokenize("in 1924") == ["in", "Ġ", "1", "9", "2", "4"]


def test_the_same_text_gives_the_same_tokenizer(corpus, tokenizer, monkeypatch):
    for parallelism in ("true", "false"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
        again = train_tokenizer(Inputs((corpus,)), vocab_size=500)
        assert tokenizer_json(again) == tokenizer_json(tokenizer)


def test_the_folder_is_a_transformers_tokenizer(tokenizer, tokenizer_folder, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    assert {p.name for p in tokenizer_folder.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)):
        assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)
        assert loaded.eos_token == loaded.bos_token == loaded.pad_token == END_OF_TEXT
        assert loaded.eos_token_id == 0
        assert loaded("ab 12")["input_ids"] == tokenizer("ab 12")["input_ids"]  # nothing put before or after
        assert loaded.decode(loaded("A , b .")["input_ids"]) == "A , b ."
    assert len(tokenizer) == vocabulary(tokenizer) == 500


def test_the_hash_is_of_what_makes_ids(tokenizer, corpus):
    before = tokenizer_hash(tokenizer)
    tokenizer(["ab", "c"], padding=True, truncation=True, max_length=1)  # leaves its settings in the backend
    assert tokenizer_hash(tokenizer) == before
    assert tokenizer_hash(train_tokenizer(Inputs((corpus,)), vocab_size=400)) != before


def test_sample_takes_the_beginning_of_each_file(tmp_path):
    for name, size in (("a.txt", 6000), ("b.txt", 3000), ("c.txt", 1000)):
        (tmp_path / name).write_text(name[0] * size)
    texts = [p.text for p in sampled(Inputs((tmp_path,)), 500)]
    assert texts == ["a" * 300, "b" * 150, "c" * 50]
    (tmp_path / "a.txt").write_text("é" * 3000)  # never half a character
    assert [p.text for p in sampled(Inputs((tmp_path / "a.txt",)), 7)] == ["ééé"]
    assert "".join(p.text for p in sampled(Inputs((tmp_path / "a.txt",)), None)) == "é" * 3000


def test_errors_name_the_argument(corpus, tmp_path):
    with pytest.raises(DataError, match=r"vocab_size must be at least 257.* got 256"):
        train_tokenizer(Inputs((corpus,)), vocab_size=256)
    with pytest.raises(DataError, match="no document is left after the filter"):
        train_tokenizer(Inputs((corpus,), filter=("zzz",)), vocab_size=300)
    with pytest.raises(DataError, match="nowhere' cannot be loaded"):
        load_tokenizer(tmp_path / "nowhere")


def test_it_says_how_far_it_is_and_how_long_the_rest_takes(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("some words to learn from " * 40)
    half = sources.Piece("text.txt", "some words to learn from " * 20, True, sources.Position(), 500)

    def slowly(inputs, sample):
        yield half
        time.sleep(2.5)
        yield half._replace(read=1000)

    monkeypatch.setattr("ccq.data.tokenizer.sampled", slowly)
    said = []
    train_tokenizer(Inputs((tmp_path / "text.txt",)), 300, say=said.append)
    assert said == ["read 50% of the text, 0:02 left; then the merges"]


def test_ctrl_c_is_heard_while_the_merges_are_learned(tmp_path):
    """Learning is native code, which hears nothing: here it is another that takes minutes."""
    (tmp_path / "text.txt").write_text("some words")
    script = f"""
        import hashlib, sys
        import tokenizers

        class Slow:
            def __init__(self, model): pass
            def train_from_iterator(self, texts, trainer):
                print("learning", flush=True)
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

        tokenizers.Tokenizer = Slow
        from ccq.cli import main
        sys.exit(main(["data", "tokenizer", {str(tmp_path / "text.txt")!r}, "--out", {str(tmp_path / "out")!r}]))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "learning\n"
            process.send_signal(signal.SIGINT)
            begun = time.monotonic()
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # what has ended stays as it ended
    assert time.monotonic() - begun < 10  # seconds of a busy machine, where learning takes minutes
    assert (process.returncode, said) == (130, "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_name_is_that_of_a_model_that_ships_or_is_asked_of_the_hub_once(monkeypatch):
    import huggingface_hub

    asked = []

    def unreachable(name, **_):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    assert load_tokenizer("gla-pico").eos_token_id is not None
    with pytest.raises(DataError, match="it is not a folder here"):
        load_tokenizer("somebody/mistyped-tokenizer")
    assert asked == ["somebody/mistyped-tokenizer"]
