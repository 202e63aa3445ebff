"""A machine with a GPU may have torch, transformers and numpy, and nothing else of what we use."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

from train_helpers import small

from ccq.train.loop import train

ABSENT = (
    "datasets",
    "lm_eval",
    "matplotlib",
    "nltk",
    "pyarrow",
    "rich",
    "rouge",
    "tensorboard",
    "tyro",
    "wonderwords",
)


def test_training_exporting_and_scoring_need_torch_and_transformers_alone(tmp_path):
    script = f"""
        import sys
        sys.modules.update(dict.fromkeys({ABSENT}))  # None: importing it raises ModuleNotFoundError
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from train_helpers import small
        from ccq.train.export import export
        from ccq.train.loop import train
        out = Path({str(tmp_path)!r})
        assert train(small(steps=4, dtype="fp32", tensorboard=True), out / "run") == 0
        export(out / "run", out / "model", dtype="fp32")
        from ccq.evaluate import main
        from ccq.evaluate.requests import Builder
        for suite, kind, more in (("lm", "score", dict(context=3)), ("niah", "generate", dict(max_new=3))):
            asked = Builder()
            for n in range(4):
                asked.add(str(n), kind, range(1, 9 + n), **more)
            asked.done(suite, dict(tokenizer_hash=None, limit=None)).save(out / "eval" / "requests" / (suite + ".npz"))
        sys.exit(main([str(out / "model"), "--suite", "lm,niah", "--stage", "score", "--out", str(out / "eval"),
                       "--device", "cpu"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensorboard is not installed" in done.stdout
    for suite, answer in (("lm", "nll"), ("niah", "tokens")):
        lines = (tmp_path / "eval" / "responses" / f"{suite}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines[1:]]
        assert sum(answer in row for row in rows) == 4


def test_tied_embeddings_are_trained_and_exported(tmp_path):
    """Once as a parameter, and the same in the head: the models that ship are tied."""
    from transformers import AutoModelForCausalLM

    from ccq.train.export import as_exported, export

    config = small("gla", steps=3, dtype="fp32", tie_word_embeddings=True)
    assert train(config, tmp_path / "run") == 0
    model, *_ = as_exported(tmp_path / "run")
    assert "lm_head.weight" not in dict(model.named_parameters())
    export(tmp_path / "run", tmp_path / "model", dtype="bf16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight.equal(model.lm_head.weight.to(loaded.lm_head.weight.dtype))
