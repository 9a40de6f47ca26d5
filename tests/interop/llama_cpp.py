"""Ask llama.cpp, through the wheels that carry it; a crash of theirs is an error here."""

import json
import os
import subprocess
import sys
from pathlib import Path

WHEELS = ("cyllama", "xllamacpp")
CHILD = Path(__file__).with_name("llama_cpp_child.py")


def ask(wheel, jobs, seconds=1800):
    """Give jobs to a wheel, in one process; return its answers."""
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    done = subprocess.run(
        [sys.executable, CHILD, wheel],
        input=lines,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    found = [line[7:] for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    if len(found) < len(jobs):
        raise AssertionError(f"{wheel} failed at {jobs[len(found)]['model']}: {done.stderr[-800:]}")
    return [json.loads(line) for line in found]


def quantize_with_llama_cpp(path, out, file_type):
    """Let llama.cpp quantise a file itself, to a number of its own for a kind of file."""
    code = (
        "import sys, cyllama.llama.llama_cpp as llama\n"
        "llama.disable_logging()\n"
        "params = llama.LlamaModelQuantizeParams()\n"
        "params.ftype, params.nthread = int(sys.argv[3]), 1\n"
        "llama.model_quantize(sys.argv[1], sys.argv[2], params)\n"
    )
    words = [sys.executable, "-c", code, str(path), str(out), str(file_type)]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    subprocess.run(words, check=True, capture_output=True, timeout=300, env=environment)
