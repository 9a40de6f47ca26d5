"""A sweep of learning rates: the same model and data, five rates, the best one named."""

import torch

from scratchlm import Learner, ModelConfig, TrainConfig
from scratchlm.data import Batch
from scratchlm.training import build_model, cosine_schedule, take_step

config = ModelConfig(vocab_size=32, context_length=32, d_model=32, num_layers=2, num_heads=4)
STEPS = 40


def batch(step: int) -> Batch:
    """Return the same batch for the same step: sequences that count upwards."""
    draw = torch.Generator().manual_seed(step)
    begin = torch.randint(config.vocab_size, (16, 1), generator=draw)
    tokens = (begin + torch.arange(config.context_length + 1)) % config.vocab_size
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


losses = {}
for lr in (1e-4, 1e-3, 3e-3, 1e-2, 1e-1):
    learner = Learner(build_model(config, 0, "cpu"), TrainConfig(steps=STEPS, lr=lr))
    for step in range(1, STEPS + 1):
        rate = cosine_schedule(step, lr, lr / 10, warmup_steps=4, cosine_steps=STEPS)
        result = take_step(learner, batch(step), step, rate)
    losses[lr] = result.loss
    print(f"lr {lr:<8g} loss {result.loss:.3f}")
best = min(losses, key=losses.get)
print(f"best: {best:g}")
assert losses[best] < losses[1e-4]
