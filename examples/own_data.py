"""Your own text: a tokenizer, token files, a run with a report; then look at what it learnt."""

import tempfile
from pathlib import Path

from scratchlm import (
    ModelConfig,
    Sampling,
    Tokenizer,
    TrainConfig,
    generate,
    load_model,
    run_plan,
    train_bpe,
)
from scratchlm.data import prepare
from scratchlm.training import DataFiles, Plan, write_report

folder = Path(tempfile.mkdtemp())
text = folder / "my.txt"
text.write_text("the cat sat on the mat. the dog ran to the hill. " * 200)

vocab, merges = train_bpe([str(text)], 280, ["<|endoftext|>"])
tokenizer = Tokenizer(vocab, merges, ["<|endoftext|>"])
prepared = prepare([text], tokenizer, folder / "data")
print(f"{prepared.train.count:,} tokens to train on, {prepared.val.count:,} held out")

files = DataFiles(
    folder / "data/train.bin", folder / "data/val.bin", folder / "data/tokenizer.json"
)
model = ModelConfig(tokenizer.vocab_size, 32, d_model=32, num_layers=2, num_heads=4)
settings = TrainConfig(steps=60, batch_size=8, lr=3e-3)
outcome = run_plan(folder / "run", Plan(model, settings, files))
print(f"{outcome.ended}; best held-out loss {outcome.progress.best_loss:.3f}")
print("report:", write_report(folder / "run"))

loaded = load_model(folder / "run")  # its best checkpoint
(story,) = generate(
    loaded.model, "the cat", tokenizer=loaded.tokenizer, max_new_tokens=8, sampling=Sampling(0)
)
print("the cat" + story.text)
