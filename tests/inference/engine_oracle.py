"""A runner whose logits are a function of the tokens that lie in a row's pages; and the naive loop.

Every page that is wrong, stale or another's changes the answer. The naive loop knows no engine.
"""

import hashlib

import torch

from inference import oracle_sampling as oracle
from scratchlm.inference import Sampling, uniform
from scratchlm.inference.requests import make_rows
from scratchlm.inference.scheduler import window_start
from scratchlm.paged import LAST


def logits_after(ids, vocab):
    """Return random logits, a function of all the tokens."""
    digest = hashlib.blake2b(str(ids).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(vocab, generator=generator) * 2


def habits(ids, vocab):
    """Return logits that mostly go round in a small circle: what a lookup can guess."""
    logits = logits_after(ids, vocab)
    logits[(ids[-1] + 1) % 3] += 9
    return logits


def draft_habits(ids, vocab):
    """Return logits near those of `habits`, and not the same."""
    return habits(ids, vocab) + logits_after([*ids, vocab], vocab) / 4


class HashRunner:
    """Writes tokens in place of keys, and reads them back from the pages."""

    def __init__(self, model, cache, chunk=None, vocab=None, logits_of=logits_after):
        self.vocab, self.cache = vocab or model.config.vocab_size, cache
        self.logits_of, self.unchanged = logits_of, True
        self.memory = cache.keys[0, :, 0, :, 0].numpy()  # (pages, page_size)
        self.num_tokens, self.steps = 0, []
        if chunk is not None:
            self.chunk = chunk

    def run(self, step, tables, last):
        self.steps.append(step)
        self.num_tokens += len(step.tokens)
        at, logits, size = 0, [], self.cache.page_size
        memory = self.memory
        for count, start, slot, wanted in zip(
            step.counts, step.starts, step.slots, step.num_logits, strict=True
        ):
            tokens = step.tokens[at : at + count]
            at += count
            if LAST in tokens:
                assert tokens == [LAST]
                tokens = [int(last[slot])]
            if count > 1 and hasattr(self, "chunk") and wanted <= 1:
                assert start % self.chunk == 0, "a piece of a prompt begins at a multiple"
            table = tables[slot].tolist()
            for i, token in enumerate(tokens, start):
                memory[table[i // size], i % size] = token
            pages = memory[table[: -(-(start + count) // size)]].ravel().astype(int).tolist()
            for end in range(start + count - wanted + 1, start + count + 1):
                logits.append(self.logits_of(pages[:end], self.vocab))
        return torch.stack(logits) if logits else torch.empty(0, self.vocab)


def verified(p, q, seed, step):
    """Return a token of distribution p by way of one of q, number by number."""
    [x] = oracle.draw(q, [uniform(seed, step, "draft")])
    p, q = p[0].tolist(), q[0].tolist()
    if uniform(seed, step, "accept") * q[x] < p[x]:
        return x
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return oracle.draw(torch.tensor([rest], dtype=torch.float64), [uniform(seed, step)])[0]


def alone(model, prompt, logits_of=logits_after, num_logprobs=None, draft_of=None, **options):
    """Return what a request gives: token ids, log-probabilities, the finish reason."""
    config = model.config
    defaults = {"tokenizer": None, "stop": (), "eos_ids": (), "sampling": Sampling()}
    [row] = make_rows([prompt], config, **{**defaults, "past_context": "error", **options})
    seen = oracle.Seen.of([row.ids], config.vocab_size, torch.device("cpu"))
    found = []
    while row.finish_reason is None:
        window = row.ids[window_start(len(row.ids), config.context_length) :]
        logits = logits_of(window, config.vocab_size)[None]
        [token] = oracle.sample(logits, row.sampling, [uniform(row.seed, row.step)], seen)
        if draft_of is not None and row.sampling.temperature:
            both = (logits, draft_of(window, config.vocab_size)[None])
            p, q = (oracle.filtered(x, row.sampling, seen).softmax(-1) for x in both)
            token = verified(p, q, row.seed, row.step)
        seen.add([token])
        best = None
        if num_logprobs is not None:
            table = logits.double().log_softmax(-1)
            values, ids = table.topk(num_logprobs)
            best = (
                table[0, token].item(),
                tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True)),
            )
        row.take(token, None)
        found.append((token, best))
    return found, row.finish_reason
