"""Run tasks on one model: likelihoods and answers come from one engine, figures from them.

evaluator = Evaluator(load_model("runs/mine"))
result = evaluator.run(read_task("capitals.jsonl"))
result.metrics["accuracy"]                        # Estimate(value, low, high)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import tasks
from scratchlm.evaluation.encoding import (
    Pair,
    document_windows,
    encode_pair,
    fit_pair,
    fit_prompt,
)
from scratchlm.evaluation.intervals import (
    Estimate,
    mean_interval,
    ratio_interval,
    wilson_interval,
)
from scratchlm.inference import GREEDY, Engine, Generation, Likelihood, Loaded, likelihoods
from scratchlm.inference.next_tokens import token_text

BEST = 10  # tokens of a next-word table
MAX_ROWS = {"cpu": 64, "cuda": 256}  # cases at once
PAGE_SIZES = {"cpu": 16, "cuda": 32}  # small, so that much of a shared beginning is whole pages
POOL_BYTES = 2 << 30  # the most that the keys and values of all rows take


@dataclass(frozen=True)
class Result:
    """What a task gave: its figures, what was counted, and each case."""

    task: str
    kind: str
    metrics: dict[str, Estimate]
    counts: dict[str, int]  # cases, tokens, bytes, contexts that were cut
    cases: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Write as plain values, without the cases."""
        metrics = {name: asdict(metric) for name, metric in self.metrics.items()}
        return {"task": self.task, "kind": self.kind, "metrics": metrics, **self.counts}


class Evaluator:
    """One model, its tokenizer, and an engine for all its tasks."""

    def __init__(
        self, loaded: Loaded, *, max_rows: int | None = None, page_size: int | None = None
    ) -> None:
        self.loaded, self.context = loaded, loaded.config.context_length
        self.tokenizer = loaded.need_tokenizer()
        self.engine = make_engine(loaded, max_rows, page_size)

    def run(self, task: tasks.Task) -> Result:
        """Run a task."""
        runs = {"text": self._texts, "choice": self._choices, "next": self._next}
        try:
            return runs.get(task.kind, self._answers)(task)
        except ScratchLMError as error:
            raise ScratchLMError(f"{task.name}: {error}") from None

    # Kinds

    def _texts(self, task: tasks.Task) -> Result:
        windows, owners, sizes = list[Pair](), list[int](), list[int]()
        for i, case in enumerate(task.cases):
            found, num_bytes = document_windows(self.loaded, case.text)
            windows += found
            owners += [i] * len(found)
            sizes.append(num_bytes)
        nats, counts = [0.0] * len(sizes), [0] * len(sizes)
        for owner, scored in zip(owners, self.likelihoods(windows), strict=True):
            nats[owner] -= scored.total
            counts[owner] += len(scored.logprobs)
        if not sum(counts) or not sum(sizes):
            raise ScratchLMError("the documents are too short to be scored")
        loss = ratio_interval(nats, counts)
        metrics = {
            "loss": loss,
            "perplexity": loss.map(_exp),
            "bits_per_byte": ratio_interval([bits / math.log(2) for bits in nats], sizes),
        }
        cases = [
            {"loss": nat / max(1, count), "tokens": count, "bytes": size}
            for nat, count, size in zip(nats, counts, sizes, strict=True)
        ]
        return self._result(task, metrics, cases, tokens=sum(counts), bytes=sum(sizes))

    def _choices(self, task: tasks.Task) -> Result:
        pairs, cut = self._pairs([(case.context, case.choices) for case in task.cases])
        totals = iter([scored.total for scored in self.likelihoods(pairs)])
        cases, right, right_by_length = [], 0, 0
        for case in task.cases:
            found = [next(totals) for _ in case.choices]
            by_length = [
                total / len(choice.encode())
                for total, choice in zip(found, case.choices, strict=True)
            ]
            chosen, chosen_by_length = _argmax(found), _argmax(by_length)
            right += chosen == case.answer
            right_by_length += chosen_by_length == case.answer
            cases.append(
                {"loglikelihoods": found, "chosen": chosen, "chosen_by_length": chosen_by_length}
            )
        count = len(task.cases)
        metrics = {
            "accuracy": wilson_interval(right, count),
            "accuracy_by_length": wilson_interval(right_by_length, count),
        }
        return self._result(task, metrics, cases, cut=cut)

    def _answers(self, task: tasks.Task) -> Result:
        prompts, cut = [], 0
        usual = min(tasks.MAX_NEW_TOKENS, max(1, self.context // 2))
        for number, case in enumerate(task.cases, start=1):
            limit = case.max_new_tokens or usual
            with _in_case(number):
                ids, was_cut = fit_prompt(self.loaded, case.prompt, limit)
            prompts.append((ids, limit, case.stop))
            cut += was_cut
        cases, right = [], 0
        for case, found in zip(task.cases, self.generate(prompts), strict=True):
            text = found.text.strip()
            is_right = text in {answer.strip() for answer in case.answers}
            right += is_right
            cases.append({"text": text, "right": is_right})
        metrics = {"exact_match": wilson_interval(right, len(cases))}
        return self._result(task, metrics, cases, cut=cut)

    def _next(self, task: tasks.Task) -> Result:
        pairs, cut = self._pairs([(case.context, (case.word,)) for case in task.cases])
        scored = self.likelihoods(pairs, num_logprobs=min(BEST, self.loaded.config.vocab_size))
        cases = [
            {
                "context": case.context,
                "next": case.word,
                "probability": math.exp(one.total),
                "greedy": one.is_greedy,
                "best": [
                    (token_text(self.tokenizer, token), math.exp(logprob))
                    for token, logprob in one.best[0]
                ],
            }
            for case, one in zip(task.cases, scored, strict=True)
        ]
        first = [one.token_ids[0] in [token for token, _ in one.best[0]] for one in scored]
        metrics = {
            "accuracy": wilson_interval(sum(one.is_greedy for one in scored), len(scored)),
            f"in_best_{BEST}": wilson_interval(sum(first), len(scored)),
            "word_perplexity": mean_interval([-one.total for one in scored]).map(_exp),
        }
        return self._result(task, metrics, cases, cut=cut)

    # Engine

    def likelihoods(self, pairs: Sequence[Pair], num_logprobs: int = 1) -> list[Likelihood]:
        """Score continuations; the weights may have changed since the last time."""
        self.engine.forget_prefixes()
        return likelihoods(self.engine, pairs, num_logprobs)

    def generate(self, prompts: Sequence[tuple[list[int], int, Sequence[str]]]) -> list[Generation]:
        """Continue prompts (ids, most new tokens, stop strings) greedily."""
        self.engine.forget_prefixes()
        handles = [
            self.engine.submit(
                ids, max_new_tokens=new, stop=stop, sampling=GREEDY, eos_ids=self.loaded.eos_ids
            )
            for ids, new, stop in prompts
        ]
        self.engine.run()
        return [handle.result() for handle in handles]

    def _pairs(self, texts: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[Pair], int]:
        """Encode the context and the continuations of each case; count those that were cut."""
        pairs, cut = [], 0
        for number, (context, continuations) in enumerate(texts, start=1):
            for continuation in continuations:
                with _in_case(number):
                    whole = encode_pair(self.loaded, context, continuation)
                    pair, was_cut = fit_pair(whole, self.context)
                    if not pair[1]:
                        raise ScratchLMError(f"{continuation!r:.40} has no token of its own")
                pairs.append(pair)
                cut += was_cut
        return pairs, cut

    def _result(
        self,
        task: tasks.Task,
        metrics: dict[str, Estimate],
        cases: list[dict[str, Any]],
        cut: int = 0,
        **counts: int,
    ) -> Result:
        counts = {"cases": len(cases), **counts, **({"cut": cut} if cut else {})}
        return Result(task.name, task.kind, metrics, counts, cases)


@contextlib.contextmanager
def _in_case(number: int) -> Iterator[None]:
    """Say which case an error is of."""
    try:
        yield
    except ScratchLMError as error:
        raise ScratchLMError(f"case {number:,}: {error}") from None


def make_engine(
    loaded: Loaded, max_rows: int | None = None, page_size: int | None = None
) -> Engine:
    """Return an engine with room for `max_rows` whole contexts, or for what memory allows."""
    model, config = loaded.model, loaded.config
    weight = model.token_embeddings.weight
    max_rows = max_rows or MAX_ROWS.get(weight.device.type, 64)
    page_size = page_size or PAGE_SIZES.get(weight.device.type, 16)
    longest = -(-config.context_length // page_size)
    page = 2 * config.num_layers * config.num_kv_heads * config.d_head * page_size
    limit = POOL_BYTES
    if weight.is_cuda:
        limit = torch.cuda.get_device_properties(weight.device).total_memory // 8
    num_pages = max(longest, min(max_rows * longest, limit // (page * weight.element_size())))
    return Engine(
        model,
        tokenizer=loaded.tokenizer,
        num_pages=num_pages,
        page_size=page_size,
        max_rows=max_rows,
        accelerate=loaded.accelerate,
    )


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
