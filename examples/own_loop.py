"""Your own training loop: the model is an ordinary torch module."""

import torch

from scratchlm import ModelConfig, TransformerLM

torch.manual_seed(0)
config = ModelConfig(vocab_size=32, context_length=32, d_model=32, num_layers=2, num_heads=4)
model = TransformerLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def batch(size: int = 16) -> torch.Tensor:
    """Return sequences that count upwards from a random number, modulo the vocabulary."""
    begin = torch.randint(config.vocab_size, (size, 1))
    return (begin + torch.arange(config.context_length + 1)) % config.vocab_size


for step in range(1, 61):
    tokens = batch()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

tokens = batch(1)
guess = model(tokens[:, :-1]).argmax(-1)[0, -1].item()
print(f"after … {tokens[0, -3].item()} {tokens[0, -2].item()} it says {guess}")
assert loss.item() < 1.0
