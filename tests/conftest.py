"""What every test stands on: fixed seeds, a CPU that does not die on bfloat16, kernels that run."""

import functools
import gc
import os
import signal
import sys

# Some CPUs announce matrix instructions that the machine then refuses; must precede torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Without a GPU the kernels run in Triton's interpreter; must precede their import.
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,  # a timing never decides whether a test passes
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("suite")


# A shell that starts a job in the background has it ignore Ctrl-C, and so would its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Keep the collector from walking through all modules and tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def cli(monkeypatch, capsys):
    """Run the command line in this process; return its exit status, stdout and stderr."""
    from scratchlm.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["scratchlm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture
def tried(record_property):
    """Record a row of the table that `make test` and `make test-slow` end with."""

    def record(what, count, note=""):
        record_property("reliability", [what, count, note])

    return record


@pytest.fixture(autouse=True, scope="session")
def _one_look_at_the_machine():
    """Measure this machine once, not in each of the many small runs: a fifth of a second each."""
    from scratchlm.cli import device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "look_at_machine", functools.cache(device.look_at_machine))
        yield


def pytest_terminal_summary(terminalreporter):
    """Print what the standing suite tried (`docs/reliability.md`), as one table."""
    rows: dict[tuple[str, str], list[int]] = {}  # (what, note): tried, failed
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name == "reliability":
                    what, count, note = value
                    row = rows.setdefault((what, note), [0, 0])
                    row[0] += count
                    row[1] += report.outcome != "passed"
    if rows:
        terminalreporter.section("reliability: what was tried")
        for (what, note), (count, failed) in sorted(rows.items()):
            verdict = "FAILED" if failed else "held"
            terminalreporter.write_line(f"{verdict:<6} {count:>7,}  {what:<53} {note}".rstrip())
