"""Settings of every test run."""

import importlib.util
import os
import signal

import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: the kernels run here in Python

import interpreter

from ccq.ops import choose

if importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.quicken()

if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    from triton.runtime.autotuner import Autotuner

    # fla tunes every kernel over dozens of configs, most of what tests on a GPU would wait for; ours are not tuned so
    all_of_them = Autotuner.prune_configs

    def few(self, kwargs):
        """The three that need the least shared memory."""
        return sorted(all_of_them(self, kwargs), key=lambda x: (x.num_stages, abs(x.num_warps - 4)))[:3]

    Autotuner.prune_configs = few

# tensors here are small, and two threads that meet a busy machine wait for each other: 0.3 s become 12
torch.set_num_threads(1)

# a script that starts the tests with `&` has them ignore Ctrl-C; the tests that send it need it heard, also by the
# processes that they start: those inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# derandomized: a failure on one machine is a failure on all; no deadline: the machine may be busy; no explain phase: it
# takes a minute where an example takes milliseconds
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("ccq", derandomize=True, deadline=None, max_examples=25, phases=PHASES)
settings.load_profile("ccq")


@pytest.fixture
def nan_in_fresh_memory():
    """torch.empty holds NaN instead of what lay there, so that reading it before writing shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fresh_compiler():
    """torch.compile without what other tests compiled: it gives up after eight variants of one function."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def no_triton(monkeypatch):
    """A machine where the Triton kernels cannot run, whatever this one is."""
    really = choose.refusal

    def refusal(op, implementation, call, backend):
        return "the test says so" if implementation.name == "triton" else really(op, implementation, call, backend)

    monkeypatch.setattr(choose, "refusal", refusal)
    choose.forget()
    yield
    choose.forget()
