"""Fine-tuning: a tiny model that can copy a word learns to reverse it, by an adapter alone."""

import json
import math
import random
import sys
from pathlib import Path

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config.lora import LoRA
from scratchlm.data.conversations import Encoder, default_template
from scratchlm.data.examples import ExampleBatches, write_examples
from scratchlm.inference import GREEDY, generate
from scratchlm.tokenizer import CharTokenizer
from scratchlm.training import Learner, TrainConfig, take_step
from scratchlm.training.lora import apply_lora, merge, remove_lora

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
letters, draw = "abcdefghijklmnop", random.Random(0)
words = sorted({"".join(draw.choices(letters, k=draw.randint(3, 6))) for _ in range(16 * steps)})
draw.shuffle(words)
held_out, words = words[: min(200, steps)], words[min(200, steps) :]

tokenizer = CharTokenizer.of_text([letters + ">"], ["<|endoftext|>"])
end = tokenizer.special_tokens["<|endoftext|>"]
encoder = Encoder(tokenizer, default_template(tokenizer, end), end)
config = ModelConfig(tokenizer.vocab_size, 64, d_model=96, num_layers=3, num_heads=4)
torch.manual_seed(0)
model = TransformerLM(config)


def learn(name: str, answer, rate: float) -> None:
    """Write the pairs as JSON Lines, encode them, and take some steps."""
    pairs = [{"prompt": f"{word}>", "completion": answer(word)} for word in words]
    Path(f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    examples = write_examples(Path(f"{name}.examples"), encoder.read(f"{name}.jsonl", 64), "")
    batches = ExampleBatches(examples, 64, batch_size=16, seed=0)  # about four to a row
    learner = Learner(model, TrainConfig(steps=steps, batch_size=16, lr=rate, weight_decay=0.0))
    for step, batch in enumerate(batches.iterate(0, steps), start=1):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        loss = take_step(learner, batch, step, rate * min(1, step / 50) * cosine).loss
    print(f"{name}: loss {loss:.3f}, {right(answer):.1%} of {len(held_out)} unseen words")


def right(answer) -> float:
    """Return the share of unseen words that are answered right."""
    told = generate(model, [f"{word}>" for word in held_out], tokenizer=tokenizer,
                    max_new_tokens=8, sampling=GREEDY, eos_ids={end})  # fmt: skip
    return sum(t.text == answer(w) for t, w in zip(told, held_out, strict=True)) / len(held_out)


learn("copy", lambda word: word, 3e-3)
apply_lora(model, LoRA(rank=16))
learn("reverse", lambda word: word[::-1], 5e-3)
merge(model)
remove_lora(model)
print(f"merged: {right(lambda word: word[::-1]):.1%}, e.g. {held_out[0]} → {held_out[0][::-1]}")
