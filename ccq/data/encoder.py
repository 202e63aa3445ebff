"""A process that turns texts into ids: started by path, so that it loads tokenizers and numpy and nothing else.

It reads pickled lists of texts from its standard input and answers each with the ids of each text, or with a message;
it ends when its input does, also when whoever started it was killed.
"""

from __future__ import annotations

import pickle
import signal
import sys

import numpy as np
from tokenizers import Tokenizer


def repaired(text: str) -> str:
    """The text with half surrogate pairs, which JSON can hold and UTF-8 cannot, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Encoder:
    def __init__(self, tokenizer: str, dtype: str) -> None:
        self.tokenizer, self.dtype = Tokenizer.from_str(tokenizer), np.dtype(dtype)
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of it

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        try:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # half surrogate pairs
            found = self.tokenizer.encode_batch_fast([repaired(t) for t in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in found]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    encoder = Encoder(*pickle.load(requests))
    while True:
        try:
            texts = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: object = encoder(texts)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
