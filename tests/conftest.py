"""What several test files share: a clean environment, the numbered scripts, and their flags."""
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = sorted((ROOT / "scripts").glob("[0-9][0-9]_*.py"))
# What the caller's shell, make or CI may have set and a test must not inherit.  With PYTHONUNBUFFERED every test of
# buffering would pass; MAKEFLAGS would hand the settings of `make test` down to the make that is tested.
STRANGE = ("PYTHONUNBUFFERED", "RANK", "NPROC", "LOG_EVERY", "REDO", "API_KEY", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES",
           "GOALS", "JOB_LOG", "JOB_LOCK", "WAIT", "STOP_WAIT", "STALL_AFTER", "STALL_EXIT")


def pytest_configure():
    """In the background of a shell, or under nohup, tests ignore Ctrl-C and HUP, and so would all that they start: a handler
    of their own, which nothing inherits, in place of that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items):
    """Slow files first (and make tells xdist to keep this order): two run at a time, and one that starts last would run alone."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(scope="session")
def environment():
    """The environment of a process under test; scripts/ is on its import path."""
    return {k: v for k, v in os.environ.items() if k not in STRANGE} | {"PYTHONPATH": str(ROOT / "scripts")}


@pytest.fixture
def parsed(monkeypatch):
    """parsed(script, argv): the values of a numbered script's flags, by its own parser."""
    def parse(script, argv):
        spec = importlib.util.spec_from_file_location(f"numbered_{script.stem}", script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, argv)])
        return vars(module.arguments())
    return parse


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Directory of a tiny random Llama (tests/tiny.py)."""
    from tiny import make

    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def prepared(tiny, tmp_path_factory):
    """02_prepare's and 03_extract's directories for 30 rows of random ids on the tiny target (tests/tiny.py)."""
    from tiny import prepare

    return prepare(tiny, tmp_path_factory.mktemp("prepared"))
