"""The attention of a head: train a model to repeat itself, and see one look back to do it."""

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.inspect import attention_weights

torch.manual_seed(0)
length, config = 12, ModelConfig(24, 24, d_model=64, num_layers=2, num_heads=4)
model = TransformerLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(200):
    half = torch.rand(32, config.vocab_size).argsort(-1)[:, :length]  # no token twice
    tokens = torch.cat([half, half], dim=1)
    targets = tokens[:, 1:].clone()
    targets[:, : length - 1] = -100  # the first half cannot be foreseen
    loss = model.loss(tokens[:, :-1], targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss after 200 steps: {loss.item():.3f}")

weights = attention_weights(model, tokens[0].tolist())  # (layers, heads, query, key)
print(f"{'head':<8}looks at, from the second half (1.00: always)")
for layer in range(config.num_layers):
    for head in range(config.num_heads):
        w = weights[layer, head]
        rows = torch.arange(length, 2 * length - 1)
        before, copy = w[rows, rows - 1].mean(), w[rows, rows - length + 1].mean()
        print(f"{layer}.{head:<6}the token before {before:.2f}, what followed last time {copy:.2f}")
assert loss.item() < 2.5
