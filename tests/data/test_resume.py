"""A run that was killed goes on where it was, and ends in the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from data.standin import EOT, WordTokenizer
from faults.dying import die_at, end_within, fork
from scratchlm.data import TokenFile, parts, prepare
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer import Tokenizer
from waiting import wait_until

TESTS = Path(__file__).parents[1]
PART = 4000

RUN = f"""
import sys
from data.standin import WordTokenizer
from scratchlm.data import parts, prepare
parts.PART_BYTES = {PART}
source, out, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = WordTokenizer()
def wait_then(progress):
    global left
    left -= progress.stage == "encode"
    if left == 0 and progress.stage == "encode":
        tokenizer.delay = 1e6  # in the next part, for a signal
made = prepare([source], tokenizer, out, workers=1, separator="{EOT}", progress=wait_then)
print(made.resumed_parts, made.parts)
"""


def start(source, out, waits_after=0):
    """Prepare in a process that may stand still after some parts."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(source), str(out), str(waits_after)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    return [int(word) for word in out.split()]


def bytes_of(out):
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def journal_lines(out):
    try:
        return (out / ".prepare" / "journal.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def wait_for(condition, process):
    def came():
        assert process.poll() is None, "it ended before it could be killed"
        return condition()

    wait_until(came)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "stories.txt"
    text = EOT.join(f"Story {i}: {'so it went on, ' * (i % 40)} the end." for i in range(400))
    path.write_text(text)
    return path


@pytest.fixture
def whole(source, tmp_path, monkeypatch):
    """The bytes of an uninterrupted run."""
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    prepare([source], WordTokenizer(), tmp_path / "whole", separator=EOT)
    return bytes_of(tmp_path / "whole")


def looks_finished(out):
    return (out / "train.json").exists() or (out / "val.json").exists()


def test_killed_three_times_it_ends_in_the_same_bytes(source, whole, tmp_path):
    out, seen = tmp_path / "out", 0
    for _ in range(3):
        process = start(source, out, waits_after=5)
        wait_for(lambda enough=seen + 5: journal_lines(out) >= enough, process)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        assert not looks_finished(out)
        seen = journal_lines(out)
    resumed, count = finish(start(source, out))
    assert 15 <= resumed < count  # nothing that the journal held was done again
    assert bytes_of(out) == whole


def killed_at(step, run):
    """Run in a copy of this process that kills itself at its step-th flush, rename or removal.

    Returns False if it came to its end before.
    """

    def work():
        die_at(step, "fsync", "replace", "unlink", "rmdir", every=True)
        run()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork: the copy runs nothing else
        ended = end_within(fork(work), 1e9)
    assert ended in (0, -signal.SIGKILL)
    return ended != 0


@pytest.mark.parametrize("split", ["documents", "tail"])
def test_killed_at_any_flush_rename_or_removal_it_ends_in_the_same_bytes(
    tmp_path, split, monkeypatch
):
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a kill, unlike a power cut, loses no write
    source = tmp_path / "a.txt"
    stories = (f"Story {i}: it went on, {'and on, ' * 60} the end." for i in range(16))
    source.write_text(EOT.join(stories))

    def run(out):
        separator = EOT if split == "documents" else None
        return prepare([source], WordTokenizer(), out, separator=separator, val_fraction=0.4)

    run(tmp_path / "whole")
    whole, out, step = bytes_of(tmp_path / "whole"), tmp_path / "out", 1
    while killed_at(step, lambda: run(out)):
        for side in ("train", "val"):  # what looks finished is finished
            if (out / f"{side}.json").exists():
                with TokenFile(out / side) as tokens:
                    tokens.validate()
        run(out)
        assert bytes_of(out) == whole
        shutil.rmtree(out)
        step += 1
    assert step > 30


def test_leftover_files_in_the_work_folder_are_ignored(source, whole, tmp_path):
    out = tmp_path / "out"
    resume(source, out)
    (out / ".prepare").mkdir()
    sidecars = {side: json.loads((out / f"{side}.json").read_text()) for side in ("train", "val")}
    (out / ".prepare" / "commit.json").write_text(json.dumps(sidecars))
    again = resume(source, out)
    assert again.resumed_parts == again.parts
    assert bytes_of(out) == whole


def test_ctrl_c_leaves_nothing_that_looks_finished_and_goes_on(source, whole, tmp_path):
    out = tmp_path / "out"
    process = start(source, out, waits_after=5)
    wait_for(lambda: journal_lines(out) >= 5, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    process.stdout.close()
    assert os.listdir(out) == [".prepare"]
    resumed, _ = finish(start(source, out))
    assert resumed >= 5
    assert bytes_of(out) == whole


def stop_after(count):
    """A progress callback that interrupts after some parts."""
    seen = []

    def report(progress):
        if progress.stage == "encode":
            seen.append(progress)
            if len(seen) == count:
                raise KeyboardInterrupt

    return report


def interrupted(source, out, count=6):
    with pytest.raises(KeyboardInterrupt):
        prepare([source], WordTokenizer(), out, separator=EOT, progress=stop_after(count))


def resume(source, out, **options):
    return prepare([source], WordTokenizer(), out, **{"separator": EOT, **options})


def test_damaged_partial_results_are_not_reused(source, whole, tmp_path):
    out = tmp_path / "out"
    for damage in ("flip", "cut", "missing", "journal"):
        interrupted(source, out)
        partial = out / ".prepare" / "train.partial"
        data = partial.read_bytes()
        if damage == "flip":
            partial.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        elif damage == "cut":
            partial.write_bytes(data[:-2])
        elif damage == "missing":
            partial.unlink()
        else:
            (out / ".prepare" / "journal.jsonl").write_text("not a journal\n")
        assert resume(source, out).resumed_parts == 0
        assert bytes_of(out) == whole
        for path in out.iterdir():
            path.unlink()


def test_a_half_written_journal_line_costs_only_its_part(source, whole, tmp_path):
    out = tmp_path / "out"
    interrupted(source, out)
    journal = out / ".prepare" / "journal.jsonl"
    journal.write_text(journal.read_text()[:-5])
    assert resume(source, out).resumed_parts == 5
    assert bytes_of(out) == whole


def test_finished_parts_are_reused_only_for_the_common_prefix_of_the_plans(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    out = tmp_path / "out"
    interrupted(source, out)
    with open(source, "a") as file:  # the hash of the source is in every key
        file.write("one more")
    assert resume(source, out).resumed_parts == 0
    interrupted(source, tmp_path / "o2")
    assert resume(source, tmp_path / "o2", val_fraction=0.2).resumed_parts == 0
    interrupted(source, tmp_path / "o3")
    (tmp_path / "more.txt").write_text("another file")
    made = prepare([source, tmp_path / "more.txt"], WordTokenizer(), tmp_path / "o3", separator=EOT)
    assert made.resumed_parts == 6


def test_an_interrupted_overwrite_leaves_the_old_result_whole(source, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    out = tmp_path / "out"
    resume(source, out)
    before = bytes_of(out)
    with pytest.raises(KeyboardInterrupt):
        resume(source, out, val_fraction=0.3, overwrite=True, progress=stop_after(4))
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert after == before


# ---- worker processes, with the real tokenizer


def real_tokenizer():
    vocab = {i: bytes([i]) for i in range(256)}
    merges = [(b"t", b"h"), (b"th", b"e"), (b" ", b"the"), (b"o", b"n"), (b"i", b"t")]
    for a, b in merges:
        vocab[len(vocab)] = a + b
    return Tokenizer(vocab, merges, [EOT])


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_does_not_change_a_byte(source, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    for out, count in (("one", 1), ("many", workers)):
        prepare([source], real_tokenizer(), tmp_path / out, separator=EOT, workers=count)
    assert bytes_of(tmp_path / "many") == bytes_of(tmp_path / "one")
    with TokenFile(tmp_path / "many/train") as tokens:
        tokens.validate()


def test_an_error_in_a_worker_is_the_same_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "0123456789"}\n' * 49 + "bad\n")
    messages = []
    for workers in (1, 2):
        with pytest.raises(ScratchLMError) as caught:
            prepare([path], real_tokenizer(), tmp_path / "out", workers=workers)
        messages.append(str(caught.value))
        assert not (tmp_path / "out").exists()
    assert (
        messages[0]
        == messages[1]
        == f"{path}: line 50: not JSON (Expecting value: line 1 column 1 (char 0))"
    )


def children_of(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PARALLEL = f"""
import sys, time
from scratchlm.data import parts, prepare
parts.PART_BYTES = {PART}
source, tokenizer, out, left = *sys.argv[1:4], int(sys.argv[4])
def wait_then(progress):
    global left
    left -= progress.stage == "encode"
    if left == 0 and progress.stage == "encode":
        time.sleep(1e6)  # for a signal
made = prepare([source], tokenizer, out, separator="{EOT}", workers=2, progress=wait_then)
print(made.resumed_parts, made.parts)
"""


def test_killed_with_workers_nothing_stays_running_and_it_ends_in_the_same_bytes(tmp_path):
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text(EOT.join(f"Story {i}: {'and so on, ' * 90} the end." for i in range(1000)))
    (tmp_path / "t").mkdir()
    real_tokenizer().save(tmp_path / "t")
    command = [sys.executable, "-c", PARALLEL, str(source), str(tmp_path / "t")]

    def run(folder, waits_after=0):
        words = [*command, str(folder), str(waits_after)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    finish(run(tmp_path / "whole"))
    process = run(out, waits_after=20)
    wait_for(lambda: journal_lines(out) >= 20, process)
    workers = children_of(process.pid)
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(map(is_running, workers)))
    resumed, count = finish(run(out))
    assert 20 <= resumed < count
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


def test_a_worker_that_dies_is_reported_and_finished_parts_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text(EOT.join(f"Story {i}: {'and so on, ' * 90} the end." for i in range(600)))

    def murder(progress):
        if progress.stage == "encode":
            for pid in children_of(os.getpid()):
                if b"scratchlm.data.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(ScratchLMError, match=r"ended with status -9 .*run the same command again"):
        prepare([source], real_tokenizer(), out, separator=EOT, workers=2, progress=murder)
    assert not looks_finished(out)
    made = prepare([source], real_tokenizer(), out, separator=EOT, workers=1)
    assert made.resumed_parts >= 1
    assert json.loads((out / "train.json").read_text())["documents"] + made.val.documents == 600


def test_ctrl_c_finds_no_lock_held_and_leaves_no_worker(tmp_path, monkeypatch):
    # A lock of the main thread's, taken when Ctrl-C arrives, would make it wait for its threads
    # for ever: so there are none. The interrupt comes from a trace, at a moment of our choosing.
    monkeypatch.setattr(parts, "PART_BYTES", PART)
    source = tmp_path / "a.txt"
    source.write_text(EOT.join(f"Story {i}: {'and so on, ' * 90} the end." for i in range(40)))
    before = set(threading.enumerate())
    seen, raised = [], threading.Event()

    def trace(frame, event, _):
        if raised.is_set() or not frame.f_code.co_filename.endswith("data/workers.py"):
            return None
        seen.append(event)
        if len(seen) == at:
            assert set(threading.enumerate()) == before
            raised.set()
            raise KeyboardInterrupt
        return trace

    for at in (60, 150, 400):
        seen.clear()
        raised.clear()
        outer = sys.gettrace()
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                prepare([source], real_tokenizer(), tmp_path / f"{at}", separator=EOT, workers=2)
        finally:
            sys.settrace(outer)
        cmdlines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(os.getpid())]
        assert not [line for line in cmdlines if b"scratchlm.data.worker" in line]
