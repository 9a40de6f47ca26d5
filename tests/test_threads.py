"""Threads that wait on a shared CPU: when they may spin, and that nothing else changes."""

import os
import subprocess
import sys
import textwrap

import pytest

from scratchlm import ModelConfig, TransformerLM
from scratchlm.checkpoint import write_checkpoint
from scratchlm.threads import BUSY, CALM_LOOKS, FREE, WaitPolicy, busy_seconds


def run_python(code: str, **environment: str) -> str:
    """Run code in a fresh process of two threads; OpenMP's settings are this process's alone."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    outer = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**outer, "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_threads_spin_at_once_where_cores_are_free():
    assert WaitPolicy(cores=2, threads=2).look(0.0)


def test_threads_sleep_beside_a_busy_program_and_spin_again_when_it_is_gone_for_good():
    policy = WaitPolicy(cores=2, threads=2)
    assert policy.look(0.0)
    assert not policy.look(BUSY + 0.1)
    assert [policy.look(0.0) for _ in range(CALM_LOOKS)] == [False] * (CALM_LOOKS - 1) + [True]


def test_a_pause_of_the_other_program_does_not_bring_the_spinning_back():
    policy = WaitPolicy(cores=2, threads=2)
    looks = [1.0, *[0.0] * (CALM_LOOKS - 1), 1.0, *[0.0] * (CALM_LOOKS - 1)]
    assert not any(policy.look(others) for others in looks)


def test_between_the_two_bounds_everything_stays_as_it_is():
    policy, between = WaitPolicy(cores=2, threads=2), (BUSY + FREE) / 2
    assert not policy.look(between)
    for _ in range(CALM_LOOKS):
        policy.look(0.0)
    assert policy.look(between)


def test_spare_cores_belong_to_the_others():
    assert WaitPolicy(cores=8, threads=4).look(4.0)
    assert not WaitPolicy(cores=8, threads=4).look(4.5)


def test_a_container_with_fewer_cores_than_threads_never_spins():
    policy = WaitPolicy(cores=1.0, threads=2)
    assert not any(policy.look(0.0) for _ in range(10))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_busy_time_grows_with_work():
    before = busy_seconds()
    assert before is not None
    for _ in range(200):  # one tick of the clock is enough
        sum(range(300_000))
        if busy_seconds() > before:
            break
    assert busy_seconds() > before


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
def test_sleeping_threads_come_and_go_and_change_no_bit():
    code = """
        import os, time, torch
        from scratchlm.threads import SleepingThreads, find_openmp
        def count():
            return len(os.listdir("/proc/self/task"))
        def product():
            x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
            for _ in range(20):
                x = torch.softmax(x @ x.T, -1)
            return x
        first, before = product(), count()
        sleeping = SleepingThreads(find_openmp(), 3)
        assert count() == before + 4, (before, count())   # three, and the one they belong to
        assert torch.equal(product(), first)
        sleeping.close()
        for _ in range(60_000):
            if count() == before:
                break
            time.sleep(0.01)
        assert count() == before, (before, count())
        assert torch.equal(product(), first)
        print("done")
    """
    assert run_python(code) == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP")
@pytest.mark.parametrize(
    ("environment", "watched"),
    [
        ({}, "True"),
        ({"OMP_WAIT_POLICY": "active"}, "False"),
        ({"GOMP_SPINCOUNT": "7"}, "False"),
        ({"OMP_NUM_THREADS": "1"}, "False"),
    ],
)
def test_a_setting_of_the_user_is_left_alone(environment, watched):
    code = "import torch; from scratchlm.threads import watch_cores; print(watch_cores())"
    assert run_python(code, **environment) == watched


DOORS = {
    "a model of one's own": ("TransformerLM(config)", 1),
    "a model without memory": ("TransformerLM(config, device='meta')", 0),
    "a loaded model": ("load_model(folder)", 1),
}


@pytest.mark.parametrize("door", DOORS)
def test_who_calls_from_python_after_importing_torch_is_served_too(door, tmp_path):
    config = ModelConfig(16, 8, 16, 1, 2)
    folder = tmp_path / "model"
    write_checkpoint(folder, model=TransformerLM(config).state_dict(), config=config)
    call, watches = DOORS[door]
    code = f"""
        import torch
        from scratchlm import ModelConfig, TransformerLM, load_model
        from scratchlm.threads import watch_cores
        config, folder = ModelConfig(16, 8, 16, 1, 2), {str(folder)!r}
        assert watch_cores.cache_info().misses == 0
        {call}
        print(watch_cores.cache_info().misses)
    """
    assert run_python(code) == str(watches)
