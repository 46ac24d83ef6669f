"""Tests of `quiet`, which suppresses output and warnings of other libraries in the current thread, and no output of
other threads.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import pytest

from accel.upstream.output_silencing import quiet


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def state() -> tuple[object, ...]:
    return sys.stdout, sys.stderr, logging.getLogger("transformers").level, list(warnings.filters)


def test_overlapping_threads_restore_the_output() -> None:
    before = state()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with quiet():
            first_in.set()
            assert second_in.wait(10)
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with quiet():
            second_in.set()
            assert first_out.wait(10)
            say("still held back")

    with redirect_stdout(io.StringIO()) as written, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()
        say("said")
    assert written.getvalue() == "said\n"
    assert state() == before


def test_output_of_other_threads_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet():
        say("held back")
        with quiet():
            say("held back within")
        say("held back behind")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(say, "said").result()
    assert capsys.readouterr().out == "said\n"
