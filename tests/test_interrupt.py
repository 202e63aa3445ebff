"""Ctrl-C gets one line and exit code 130, also before a command has begun."""

import subprocess
import sys
import textwrap

import pytest


def interrupted(when, *arguments, swallowed=False):
    """`python -m ccq ARGUMENTS`, with SIGINT in the middle of the import of the module `when`."""
    script = f"""
        import os, runpy, signal, sys, time

        class Interrupt:
            def find_spec(self, name, path=None, target=None):
                if name == {when!r}:
                    try:
                        os.kill(os.getpid(), signal.SIGINT)
                        time.sleep(1)
                    except KeyboardInterrupt:
                        if {swallowed}:
                            raise ModuleNotFoundError("another error made of it") from None
                        raise

        sys.meta_path.insert(0, Interrupt())
        sys.argv = ["ccq", *{arguments!r}]
        runpy.run_module("ccq", run_name="__main__")
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)


@pytest.mark.parametrize("when", ["ccq.cli", "argparse", "torch"])
def test_an_interrupted_import_is_a_line(when):
    found = interrupted(when, "info", "ccq-gla-tiny")
    assert (found.returncode, found.stderr, found.stdout) == (130, "interrupted\n", "")


def test_nor_does_an_import_that_makes_another_error_of_it_show():
    found = interrupted("ccq.model.info", "info", "ccq-gla-tiny", swallowed=True)
    assert (found.returncode, found.stderr) == (130, "interrupted\n")


def test_ignored_it_stays_ignored():
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['ccq', '--version']\n"
    script += "import atexit, ccq.__main__ as m\n"
    script += "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)); m.main()"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "True" in found.stdout
