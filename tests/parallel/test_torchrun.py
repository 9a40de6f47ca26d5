"""Ranks that die: the job ends, nothing is lost, and the resumed run is the uninterrupted one."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException

from forked import ForkedCommand
from inference.tiny import byte_tokenizer
from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import find_checkpoints
from scratchlm.cli import main
from scratchlm.cli.training_run import rank_settings
from scratchlm.config import Rotary
from scratchlm.errors import ScratchLMError
from scratchlm.interop import write_hf
from scratchlm.parallel.launch import relaunch, without_gpus
from scratchlm.parallel.ranks import Ranks, _store_of_this_start
from scratchlm.training import watch_signals
from scratchlm.training.interruption import SIGNALS
from test_architecture import SRC
from training.tiny import write_data
from waiting import wait_until

MODEL = [
    *("model.d_model=32", "model.num_layers=2", "model.num_heads=4", "model.context_length=32"),
    *("train.batch_size=8", "train.eval_every=0", "train.save_every=5", "train.rank_timeout=600"),
]


def command(out, data, steps, *, resume=False):
    words = ["train", str(data / "train.bin"), "--out", str(out), "--device", "cpu", *MODEL]
    return [*words, f"train.steps={steps}", *(["--resume"] if resume else [])]


def start(words, ranks=2, more=()):
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *more, "-m"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, "scratchlm", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_script_of_the_page_runs_on_two_ranks(tmp_path):
    page = (SRC.parent.parent / "docs" / "howto" / "parallel.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```text\n(# two\.py.*?)```", page, re.S)
    (tmp_path / "two.py").write_text(script.replace('"cuda"', '"cpu"'))
    tokenizer, place = byte_tokenizer("<|endoftext|>"), tmp_path / "path/to/Llama-3.2-1B"
    config = ModelConfig(tokenizer.vocab_size, 64, 16, 2, 2, positions=Rotary(layout="half"))
    place.parent.mkdir(parents=True)
    torch.manual_seed(0)  # other weights might write nothing
    write_hf(place, config, TransformerLM(config).state_dict(), tokenizer.save(tmp_path / "tok"))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "two.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    text = done.stdout.rstrip(b"\n")
    assert text, "the ranks say what they wrote"
    assert text[: len(text) // 2] == text[-(len(text) // 2) :], "both the same"


def test_ranks_that_share_a_core_end_without_an_error(tmp_path):
    """The main thread keeps Python's lock until its end, as it does where cores are busy."""
    script = tmp_path / "sums.py"
    script.write_text(
        "import os, sys, torch\n"
        "from scratchlm.parallel.ranks import join_for_good\n"
        "if hasattr(os, 'sched_setaffinity'):\n"
        "    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "join_for_good('cpu', 2)\n"
        "sys.setswitchinterval(1000)\n"
        "x = torch.ones(4)\n"
        "for _ in range(20): torch.distributed.all_reduce(x)\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run([sys.executable, *words], capture_output=True)
    assert done.returncode == 0, done.stderr


def ranks_of(job):
    """Return the processes that a launcher has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == job.pid:
            found.append(int(status.parent.name))
    return sorted(found)


def log_of(out):
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


def one_process(out, data, steps):
    """Train without ranks, in this process, whose torch is there already."""
    words = [*command(out, data, steps), "train.micro_batch_size=4"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["scratchlm", *words])
            with pytest.raises(SystemExit) as ended:
                main()
    finally:
        torch.set_num_threads(threads)
    assert ended.value.code == 0
    return log_of(out)


def kill_and_resume(tmp_path, kills, steps, seed):
    """Kill a rank again and again; return the log of the run at its end."""
    draw, data, out = random.Random(seed), write_data(tmp_path / "data"), tmp_path / "killed"
    resume = False
    for _ in range(kills):
        before = {path.name for path in find_checkpoints(out)}
        job = start(command(out, data, steps, resume=resume))
        wait_until(lambda known=before: {p.name for p in find_checkpoints(out)} - known)
        time.sleep(draw.random() * 0.2)  # often inside a write
        os.kill(draw.choice(ranks_of(job)), signal.SIGKILL)
        told, _ = job.communicate()
        assert job.returncode != 0, told
        assert "exitcode  : -9" in told, told[-2000:]  # which rank, and why
        resume = True
    job = start(command(out, data, steps, resume=True))
    told, _ = job.communicate()
    assert job.returncode == 0, told[-3000:]
    left = [path.name for path in (out / "checkpoints").iterdir()]
    assert all(name.startswith("step-") for name in left), left
    return log_of(out), one_process(tmp_path / "whole", data, steps)


KILLS = "kills of one rank of two, the log that of one process to the bit"


@pytest.mark.slow  # four processes that import torch, twice
def test_a_killed_rank_ends_the_job_and_the_resumed_run_is_the_uninterrupted_one(tmp_path, tried):
    killed, whole = kill_and_resume(tmp_path, kills=1, steps=40, seed=0)
    assert killed == whole  # of two ranks and of two micro-batches: to the bit
    tried(KILLS, 1)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_of_a_rank_lose_nothing(tmp_path, tried, kills):
    """Forked ranks: with `torchrun` around them each start takes ten seconds."""
    script = str(Path(__file__).with_name("kill_ranks.py"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(kills), "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    tried(KILLS, found["kills"], f"{found['in_a_write']} inside a write")


@pytest.mark.slow
def test_sigterm_saves_once_and_stops_all_ranks(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "run"
    job = start(command(out, data, 5_000))
    wait_until(lambda: find_checkpoints(out))
    job.send_signal(signal.SIGTERM)
    job.communicate()
    assert job.returncode != 0
    last = int(find_checkpoints(out)[-1].name.removeprefix("step-"))
    assert log_of(out)[-1][0] == last  # the step it stopped at is saved


def test_a_launcher_that_is_stopped_says_so_by_its_status(monkeypatch):
    def stopped(words):
        raise SignalException("Process 1 got signal: 2", sigval=signal.SIGINT)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed.run, "main", stopped)
    assert relaunch(2, ["train", "x.txt"]) == 130


def test_a_rank_does_not_end_of_a_second_signal():
    """torchrun passes on what it gets, and SLURM sends to both."""
    with watch_signals(is_rank=True) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.exit_status == 143
        assert {signal.getsignal(each) for each in SIGNALS} == {signal.SIG_IGN}


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_within_the_time_limit(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "run"
    job = start([*command(out, data, 5_000), "train.rank_timeout=5"])
    wait_until(lambda: find_checkpoints(out))
    began = time.monotonic()
    os.kill(ranks_of(job)[-1], signal.SIGSTOP)
    told, _ = job.communicate()
    assert job.returncode != 0
    assert "error:" in told
    assert "the job ends" in told
    assert time.monotonic() - began < 5 + 30 + 40  # the limit, torchrun's patience, a slow machine


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_machine_with_fewer_gpus_is_named():
    made = ForkedCommand("train", "x.txt", "--gpus", "512")
    _, err = made.communicate()
    assert made.returncode == 2
    assert err.startswith("error: --gpus 512: this machine has ")
    assert without_gpus(["train", "--gpus", "8", "x", "--gpus=8", "--out", "y"]) == [
        *("train", "x", "--out", "y")
    ]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("words", "size", "says"),
    [
        (["--gpus", "2", "--device", "cpu"], None, "--gpus 2 takes the first GPUs"),
        (["--gpus", "2", "--device", "cuda:1"], None, "not --device cuda:1"),
        (["--device", "cuda:1"], "2", "each of several ranks has a GPU of its own"),
        (["--gpus", "4"], "2", "--gpus 4: torchrun has started 2 already"),
    ],
)
def test_options_that_contradict_ranks_are_refused(words, size, says):
    told = {} if size is None else {"RANK": "0", "WORLD_SIZE": size}
    made = ForkedCommand("train", "x.txt", *words, prepare=lambda: os.environ.update(told))
    _, err = made.communicate()
    assert made.returncode == 2
    assert says in err


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_one_process_of_torchrun_is_one_process(tmp_path):
    data, alone = write_data(tmp_path / "data"), {"RANK": "0", "WORLD_SIZE": "1"}
    words = [*command(tmp_path / "run", data, 2), "train.parallel=none"]
    made = ForkedCommand(*words, prepare=lambda: os.environ.update(alone))
    _, err = made.communicate()
    assert made.returncode == 0, err


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"RANK": "abc"}, "RANK='abc' in the environment"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' in the environment"),
        ({"MASTER_PORT": "x"}, "the 2 ranks did not find each other"),
        ({"RANK": "1"}, "the 2 ranks did not find each other"),  # nobody listens
    ],
)
def test_ranks_that_are_told_nonsense_end_with_one_line(tmp_path, told, says):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    words = [*command(tmp_path / "run", tmp_path, 1), "train.rank_timeout=1"]
    made = ForkedCommand(*words, prepare=lambda: os.environ.update({**place, **told}))
    _, err = made.communicate()
    assert made.returncode == 2, err
    assert "Traceback" not in err
    assert f"error: {says}" in err


def test_what_the_first_rank_does_not_live_to_say_is_one_line():
    class Gone:
        def check(self, names):
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    ranks = Ranks(1, 2, torch.device("cpu"), None, None, Gone(), 1.0)
    with pytest.raises(ScratchLMError, match=r"another rank is gone.*the job ends"):
        ranks.from_first(None)


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_that_are_started_again_hear_nothing_of_the_last_start(monkeypatch, machines):
    """torchrun keeps one store; it counts the starts, but not alike on several machines."""
    limit = timedelta(seconds=60)
    server = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    told = {"USE_AGENT_STORE": "True", "RESTART_COUNT": "0"}
    told = {f"TORCHELASTIC_{name}": value for name, value in told.items()}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in {**told, "GROUP_WORLD_SIZE": str(machines)}.items():
        monkeypatch.setenv(name, value)
    one, other = (_store_of_this_start(rank, 2, limit) for rank in (0, 1))
    one.set("newest", "step 4")
    assert other.get("newest") == b"step 4"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    if machines == 1:
        assert not _store_of_this_start(0, 2, limit).check(["newest"])
        return
    with pytest.raises(ScratchLMError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun"):
        _store_of_this_start(0, 2, limit)


@pytest.mark.slow  # torchrun, twice
def test_torchrun_starts_killed_ranks_again_from_the_last_checkpoint(tmp_path):
    data, out = write_data(tmp_path / "data"), tmp_path / "run"
    job = start(command(out, data, 400, resume=True), more=["--max-restarts=1"])
    wait_until(lambda: find_checkpoints(out))
    os.kill(ranks_of(job)[-1], signal.SIGKILL)
    told, _ = job.communicate()
    assert job.returncode == 0, told[-3000:]
    assert "going on from step" in told
    assert log_of(out) == one_process(tmp_path / "whole", data, 400)


def test_what_ranks_tell_each_other_is_forgotten_when_all_have_read_it():
    store = torch.distributed.HashStore()
    pair = [Ranks(rank, 2, torch.device("cpu"), None, None, store, 60.0) for rank in (0, 1)]

    def tell(ranks):
        return [ranks.gather("saved", [step, ranks.rank]) for step in range(20)]

    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(tell, pair))
    assert heard == [[[[step, 0], [step, 1]] for step in range(20)]] * 2
    assert store.num_keys() == 2


def test_what_was_typed_about_ranks_reaches_them(tmp_path):
    typed = {"tp": 2, "cp": 4, "backend": "gloo", "rank_timeout": 30}
    settings = rank_settings(tmp_path, typed)
    assert {name: getattr(settings, name) for name in typed} == typed
