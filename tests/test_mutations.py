"""A test of the tests: put one well-known mistake in, and the suite goes red."""

import os
import sys
from pathlib import Path

import pytest

from forked import run_forked
from mutations import MUTATIONS

ROOT = Path(__file__).parent.parent


def run_mutated(mutation, targets, log):
    """Run tests in a forked child, with the mistake in place there and nowhere else."""

    def work():
        # The tests must be imported anew, after the mistake: they hold on to functions.
        for name in list(sys.modules):
            if name.split(".")[0] in ("tests", "ops", "tiny_models", "mutations", "conftest"):
                del sys.modules[name]
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
            os.environ.pop(name, None)
        command = ["-p", "mutations", "-p", "no:cacheprovider", "-p", "no:xdist", "-x"]
        command += ["--tb=line", "--rootdir", str(ROOT), "--mutation", mutation]
        return int(pytest.main(command + [str(ROOT / target) for target in targets]))

    return run_forked(work, log)


def test_there_are_at_least_twelve():
    assert len(MUTATIONS) >= 12


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_suite_notices(mutation, tmp_path):
    log = tmp_path / "log"
    status = run_mutated(mutation, MUTATIONS[mutation][3], log)
    text = log.read_text()
    # 1: a test ran and failed; anything else would be a broken run, which proves nothing.
    assert status == 1, text[-3000:]
    assert "1 failed" in text
    for breakage in ("ImportError", "NameError", "AttributeError", "TypeError", "NotFoundError"):
        assert breakage not in text
