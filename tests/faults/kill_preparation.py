"""Kill `prepare` for real, again and again, and see whether anything is lost.

    python tests/faults/kill_preparation.py DIRECTORY KILLS SEED

Each life is a forked child that prepares the same text into the same folder. Every other one is
sent SIGKILL after a random time, the rest at a flush or a rename that is drawn. When a life comes
to its end, the token files must equal those of an undisturbed run, byte for byte. The last line
printed is a JSON summary.
"""

import json
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from faults.dying import die_at, end_within, fork
from scratchlm.data import TokenFile, prepare
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer import CharTokenizer


def life(sources: Path, out: Path, tokenizer: CharTokenizer, dies_at: int = 0) -> int:
    def work() -> None:
        die_at(dies_at, "fsync", "replace")
        prepare([sources], tokenizer, out, workers=1, val_fraction=0.2)

    return fork(work)


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}


def why_not_whole(path: Path) -> str | None:
    try:
        with TokenFile(path) as tokens:
            tokens.validate()
    except ScratchLMError as error:
        return str(error)
    return None


def main(directory: Path, wanted: int, seed: int) -> None:
    sources = directory / "text"
    sources.mkdir(parents=True)
    chance = random.Random(seed)
    for i in range(40):
        words = " ".join(chance.choice(("cat", "dog", "sat", "on", "mat")) for _ in range(400))
        (sources / f"{i:02d}.txt").write_text(words)
    tokenizer = CharTokenizer(sorted("catdogsnm "), ["<|endoftext|>"])
    began = time.monotonic()
    assert end_within(life(sources, directory / "quiet", tokenizer), 1e9) == 0
    whole = time.monotonic() - began
    truth, kills, in_work, runs = files(directory / "quiet"), 0, 0, 0
    while kills < wanted:
        out, lives = directory / f"out{runs}", 0
        while True:
            patience, dies_at = 1e9, 0
            if kills < wanted and lives % 2:
                patience = chance.uniform(0, 0.7) * whole
            elif kills < wanted:
                dies_at = chance.randrange(1, 12)
            code = end_within(life(sources, out, tokenizer, dies_at), patience)
            lives += 1
            if code == 0:
                break
            assert code == -signal.SIGKILL, f"a life ended with {code}"
            kills += 1
            in_work += (out / ".prepare").exists()
            for name in ("train", "val"):  # a finished file is whole; an unfinished one says so
                why = why_not_whole(out / name)
                assert why is None or "no such token file" in why or "not finished" in why
        assert files(out) == truth, f"{out} differs"
        assert not (out / ".prepare").exists()
        runs += 1
    print(json.dumps({"kills": kills, "in_work": in_work, "runs": runs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
