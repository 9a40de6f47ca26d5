"""What a killed process leaves is removed by the next of its kind, and a reader sees no damage."""

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import scratchlm
from scratchlm import ModelConfig, TransformerLM
from scratchlm import checkpoint as ckpt
from scratchlm.durable import PREFIX, temporary_directory, whole_directory, write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.inference import load_model
from scratchlm.ops import native

CONFIG = ModelConfig(vocab_size=11, context_length=8, d_model=8, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def weights():
    return dict(TransformerLM(CONFIG).state_dict())


def in_a_child(work):
    """Run `work` in a forked child that is killed in the midst of it."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_half_written_by_a_dead_process_is_removed_by_the_next(tmp_path):
    def work():
        os.replace = die
        write_atomically(tmp_path / "tokenizer.json", b"x")

    in_a_child(work)
    assert len(os.listdir(tmp_path)) == 1
    write_atomically(tmp_path / "other", b"y")
    assert len(os.listdir(tmp_path)) == 2  # of another kind
    write_atomically(tmp_path / "tokenizer.json", b"y")
    assert sorted(os.listdir(tmp_path)) == ["other", "tokenizer.json"]


@pytest.mark.parametrize("kind", ["export", "import"])
def test_a_directory_half_written_by_a_dead_process_is_removed_by_the_next(tmp_path, weights, kind):
    from scratchlm.interop import write_hf

    def write(name):
        if kind == "export":
            write_hf(tmp_path / name, CONFIG, weights)
        else:
            ckpt.write_checkpoint(tmp_path / name, model=weights, config=CONFIG)

    def work():
        os.rename = Path.rename = die
        write("one")

    in_a_child(work)
    assert [name.startswith(PREFIX) for name in os.listdir(tmp_path)] == [True]
    write("two")
    assert os.listdir(tmp_path) == ["two"]


def test_what_a_living_process_is_writing_is_left_alone(tmp_path):
    with whole_directory(tmp_path / "mine") as beside:
        (beside / "file").write_bytes(b"x")
        with whole_directory(tmp_path / "other") as another:
            (another / "file").write_bytes(b"y")
        assert (beside / "file").read_bytes() == b"x"
    assert sorted(os.listdir(tmp_path)) == ["mine", "other"]


def test_an_error_leaves_nothing_and_names_the_file(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "report.html", b"x")
    assert caught.value.filename == str(tmp_path / "report.html")
    with pytest.raises(OSError, match="No space"), whole_directory(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_link_stays_and_a_device_is_not_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"x"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ScratchLMError, match="fifo: not a regular file"):
        write_atomically(tmp_path / "fifo", b"x")


# Work folders whose files grow and are truncated on resume; and streams to a worker.
MAY_OPEN_TO_WRITE = {
    "durable.py",
    "data/encoding.py",
    "data/journal.py",
    "data/plan.py",
    "data/worker.py",
    "training/metrics.py",
    "training/run.py",  # the lock
    "check/child.py",  # pipes
    "check/driving.py",  # a temporary folder
}


def test_everything_is_written_through_one_module():
    source = Path(scratchlm.__file__).parent
    for path in source.rglob("*.py"):
        if str(path.relative_to(source)) in MAY_OPEN_TO_WRITE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            where = f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"
            assert name not in ("write_text", "write_bytes", "copyfile", "copy2"), where
            if name in ("open", "fdopen"):
                words = [a.value for a in node.args if isinstance(a, ast.Constant)]
                modes = [w for w in words if isinstance(w, str) and set(w) <= set("rwxab+t")]
                assert all(set(mode) <= set("rbt") for mode in modes), where
            if name == "savefig":
                assert "buffer" in ast.unparse(node) or "content" in ast.unparse(node), where


# Readers beside a trainer


SAVE_AND_PRUNE = """
import sys
from faults.test_left_behind import CONFIG, ckpt
from scratchlm import TransformerLM
weights = dict(TransformerLM(CONFIG).state_dict())
run, step = sys.argv[1], 1
while True:
    ckpt.write_checkpoint(ckpt.checkpoint_path(run, step), model=weights, config=CONFIG)
    ckpt.prune_checkpoints(run, 1)
    step += 1
"""


def test_loading_while_a_trainer_replaces_its_only_checkpoint_always_succeeds(tmp_path):
    tests = str(Path(__file__).parent.parent)
    script = f"import sys; sys.path.insert(0, {tests!r})\n{SAVE_AND_PRUNE}"
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        while not ckpt.find_checkpoints(tmp_path):
            assert process.poll() is None
            time.sleep(0.01)
        warnings, seen = [], set()
        loads = 0
        while loads < 60 or len(seen) <= 3:  # it is replaced all the while, however slowly
            assert process.poll() is None
            seen.add(load_model(tmp_path, warn=warnings.append).source.name)
            loads += 1
    finally:
        process.kill()
        process.wait()
    assert warnings == []


def test_a_checkpoint_that_vanished_is_not_called_damaged(tmp_path, weights):
    path = ckpt.checkpoint_path(tmp_path, 1)
    with pytest.raises(ScratchLMError, match="no such checkpoint; it may have been removed"):
        ckpt.verify_checkpoint(path)
    ckpt.write_checkpoint(path, model=weights, config=CONFIG)

    def read(found):
        if found == path:
            ckpt.write_checkpoint(ckpt.checkpoint_path(tmp_path, 2), model=weights, config=CONFIG)
            ckpt.prune_checkpoints(tmp_path, 1)
            raise ScratchLMError(f"{found}: no such file")
        return found.name

    assert ckpt.read_chosen(tmp_path, read) == "step-00000002"


# The compiler


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    native._loaded.cache_clear()
    yield monkeypatch
    native._loaded.cache_clear()


def test_a_compiler_that_hangs_is_waited_for_once_and_not_in_silence(fresh, tmp_path, caplog):
    compiler = tmp_path / "compiler"
    # With a child that holds its pipes.
    compiler.write_text("#!/bin/sh\nsleep 9999999 & sleep 9999999\n")
    compiler.chmod(0o700)
    fresh.setenv("CXX", str(compiler))
    fresh.setattr(native, "TIME_LIMIT", 1.0)
    fresh.setattr(native, "NOTICE_AFTER", 0.2)
    assert native.library() is None  # so it was not waited for to its end
    assert "did not end within" in native.why_not()
    assert "waiting for" in caplog.text
    native._loaded.cache_clear()
    fresh.setattr(native, "_run", lambda *command: pytest.fail("asked again"))
    assert native.library() is None
    assert "hung before and is not asked again" in native.why_not()
    compiler.write_text("#!/bin/sh\nexit 1\n")  # another one is asked
    native._loaded.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        native.library()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU time is not told here")
def test_a_compiler_that_gets_little_of_the_machine_is_waited_for(fresh, tmp_path):
    """It works for a twentieth of a second in each quarter, and ends after more than the limit."""
    work = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
    compiler = tmp_path / "compiler"
    script = f"for part in 1 2 3 4 5 6 7 8; do {work}; sleep 0.2; done; echo tired >&2; exit 1"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    fresh.setenv("CXX", str(compiler))
    fresh.setattr(native, "TIME_LIMIT", 1.0)
    fresh.setattr(native, "NOTICE_AFTER", 0.4)
    assert native.library() is None
    assert native.why_not() == f"{compiler}: tired"


@pytest.mark.skipif(native._loaded()[1] is not None, reason="no C++ compiler here")
def test_a_library_without_our_symbols_is_a_reason_not_an_attribute_error(fresh, tmp_path):
    source = tmp_path / "attention.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    fresh.setattr(native, "SOURCE", source)
    assert native.library() is None
    assert "has no attend" in native.why_not()


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path):
    contents = [bytes([i]) * 50_000 for i in range(8)]
    errors = []

    def write(content):
        try:
            for _ in range(10):
                write_atomically(tmp_path / "file", content)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert (tmp_path / "file").read_bytes() in contents
    assert os.listdir(tmp_path) == ["file"]


def test_without_locks_what_another_process_left_is_left_and_not_in_the_way(tmp_path, monkeypatch):
    """A container's first process has the same number every time."""
    import itertools

    from scratchlm import durable

    def no_locks(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(durable.fcntl, "flock", no_locks)
    monkeypatch.setattr(durable, "_COUNT", itertools.count())
    (tmp_path / f".file.{os.getpid()}-0.partial").write_text("left")
    (tmp_path / f"{PREFIX}folder-{os.getpid()}-2").mkdir()
    write_atomically(tmp_path / "file", b"")
    with whole_directory(tmp_path / "folder") as beside:
        (beside / "x").write_text("y")
    assert (tmp_path / "file").read_bytes() == b""
    assert (tmp_path / "folder" / "x").read_text() == "y"
    assert len(os.listdir(tmp_path)) == 4


def test_a_temporary_directory_is_gone_afterwards(tmp_path):
    with temporary_directory(tmp_path, "x") as folder:
        (folder / "y").write_text("z")
    assert os.listdir(tmp_path) == []
