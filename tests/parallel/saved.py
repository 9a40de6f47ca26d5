"""The settings of a run that several ranks save and take up."""

from scratchlm.training import TrainConfig

ROWS = 12
SAVED = TrainConfig(steps=8, batch_size=ROWS, eval_every=4, save_every=4, lr=3e-3, keep_last=9)
