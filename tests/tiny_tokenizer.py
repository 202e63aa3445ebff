"""A tokenizer of bytes, for tests that ask in text."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = range(3)
VOCABULARY = 3 + 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), names, strict=False))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    made.chat_template = TEMPLATE
    return made
