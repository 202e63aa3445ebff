"""A tokenizer made here: words, capitals and digits apart, so that new things fall into pieces as real ones do."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from ccq.analysis.prompts import make_prompts

    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    pieces = Regex(r" ?[A-Z]{1,3}| ?[A-Z]?[a-z]+|\d|[^\w\s]|\s")
    raw.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>"], show_progress=False)
    raw.train_from_iterator([prompt.text for prompt in make_prompts(8)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="<s>")
