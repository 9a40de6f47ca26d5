"""lm-evaluation-harness on our engine: an `LM` of theirs, and `scratchlm evaluate --lm-eval`.

    lm = ScratchLMForHarness(Evaluator(load_model("runs/mine")))
    lm_eval.simple_evaluate(model=lm, tasks=["my_task"], task_manager=TaskManager(include_path=…))

Texts become ids, and answers texts, by the harness's own rules, as its `hf` model applies them.
Needs the extra `eval`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import evaluator as harness
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from scratchlm.errors import ScratchLMError, did_you_mean
from scratchlm.evaluation.encoding import fit_pair, prefix_token
from scratchlm.evaluation.intervals import Estimate, Z
from scratchlm.evaluation.running import Evaluator, Result
from scratchlm.inference import Sampling
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.untrusted import MAX_TOKENIZER_BYTES, brief, read_json

MAX_NEW_TOKENS = 256  # where a task does not say: what the harness's models have
_CONTINUED = "\u241fcontinued\u241f "  # stands where a message is to be continued
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ScratchLMForHarness(TemplateLM):
    """A model of ours as the harness asks for it."""

    def __init__(self, evaluator: Evaluator) -> None:
        super().__init__()
        self.evaluator, self.loaded = evaluator, evaluator.loaded
        self._device = evaluator.engine.device
        named = _named_tokens(self.loaded.source, evaluator.tokenizer)
        self._bos, self._eos = named.get("bos_token"), named.get("eos_token")

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ends = self.loaded.eos_ids
        if self._eos is None and not ends:
            raise ScratchLMError(f"{self.loaded.source}: the harness needs an end-of-text token")
        return ends[0] if self._eos is None else self._eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: begin-of-text, else end-of-text."""
        if self._bos is not None:
            return self._bos
        found = prefix_token(self.loaded) if self._eos is None else None
        return self.eot_token_id if found is None else found

    @property
    def max_length(self) -> int:
        """The model's context."""
        return self.loaded.config.context_length

    @property
    def tokenizer_name(self) -> str:
        """A name for caches of requests."""
        return str(self.loaded.source).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Encode a text; what the tokenizer puts around it, unless it is there or not wanted."""
        tokenizer = self.evaluator.tokenizer
        if add_special_tokens is None:
            prefix = tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return tokenizer.encode(string)

    def tok_decode(self, ids: Sequence[int]) -> str:
        """Decode an answer, without special tokens and without ids that stand for none."""
        tokenizer = self.evaluator.tokenizer
        special = set(tokenizer.special_tokens.values())
        known = tokenizer.vocab if isinstance(tokenizer, Tokenizer) else range(tokenizer.vocab_size)
        return tokenizer.decode([token for token in ids if token in known and token not in special])

    # Chats

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's template, where prompts are to go through it."""
        if not chat_template:
            return ""
        if chat_template is not True:
            raise ScratchLMError(f"the harness asked for a chat template {chat_template!r}")
        return self._template().templates.get("default")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a chat down; without a generation prompt, its last message is to be continued."""
        if add_generation_prompt:
            return self._template().render(chat_history, add_generation_prompt=True)
        *before, last = chat_history
        marked = {**last, "content": last["content"] + _CONTINUED}
        rendered = self._template().render([*before, marked])
        text, mark, rest = rendered.rpartition(_CONTINUED.rstrip())
        if not mark:
            raise ScratchLMError("the chat template leaves out the message that is to be continued")
        return text if rest.startswith(" ") else text.rstrip()  # a template may strip spaces

    def _template(self) -> ChatTemplate:
        if self.loaded.chat_template is None:
            raise ScratchLMError(f"{self.loaded.source}: the model has no chat template")
        return self.loaded.chat_template

    # Requests

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [fit_pair((context, rest), self.max_length)[0] for _, context, rest in requests]
        found = [(one.total, one.is_greedy) for one in self.evaluator.likelihoods(pairs)]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, in windows of the context's length."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, rest in map(make_disjoint_window, cut):
                windows.append((None, context, rest))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts until a stop string."""
        self.evaluator.engine.forget_prefixes()
        submitted = [self._submit(i, *request.args) for i, request in enumerate(requests)]
        self.evaluator.engine.run()
        answers = []
        for request, (handle, until) in zip(requests, submitted, strict=True):
            text = self.tok_decode(handle.result().token_ids)
            answers.append(postprocess_generated_text(text, until, None))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _submit(self, number: int, context: str, options: Mapping[str, Any]) -> Any:
        known = normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS)
        end = self.evaluator.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(known.pop("until", None), eos=end)
        new_tokens = known.pop("max_gen_toks")
        room = self.max_length - new_tokens
        if room < 1:
            raise ScratchLMError(
                f"an answer of {new_tokens} tokens does not fit the context of {self.max_length}"
            )
        handle = self.evaluator.engine.submit(
            self.tok_encode(context)[-room:],
            max_new_tokens=new_tokens,
            stop=[text for text in until if text],
            sampling=_sampling(known),
            seed=number,
            eos_ids={*self.loaded.eos_ids, self.eot_token_id},
        )
        return handle, until


def _sampling(options: dict[str, Any]) -> Sampling:
    draws = options.pop("do_sample", False)
    given = {name: options.pop(name) for name in _SAMPLED if name in options}
    unknown = [name for name, value in options.items() if (name, value) != ("num_beams", 1)]
    if unknown:
        raise ScratchLMError(f"generation option {unknown[0]!r} is not supported")
    return Sampling(**given if draws else {"temperature": 0.0})


def _named_tokens(source: Path, tokenizer: Any) -> dict[str, int]:
    """Read which tokens begin and end a text, where the model's folder says so."""
    path = source / "tokenizer_config.json"
    if not path.is_file():
        return {}
    table, found = read_json(path, MAX_TOKENIZER_BYTES), {}
    for name in ("bos_token", "eos_token"):
        text = table.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        if isinstance(text, str) and text in tokenizer.special_tokens:
            found[name] = tokenizer.special_tokens[text]
    return found


# Whole tasks


def run_harness(
    evaluator: Evaluator,
    tasks: Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat_template: bool = False,
) -> list[Result]:
    """Run tasks of the harness by name, or of a folder of one's own; figures as they call them."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(tasks, None if include_path is None else str(include_path))
    try:
        found = _evaluate(
            model=ScratchLMForHarness(evaluator),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=chat_template,
            task_manager=manager,
            bootstrap_iters=1000,
        )
    except (ScratchLMError, RuntimeError, MemoryError):
        raise
    except Exception as error:  # of a task: data that is not there, a field that it does not have
        why = brief(error) or type(error).__name__
        raise ScratchLMError(f"--lm-eval {', '.join(tasks)}: {why}") from error
    samples = found.get("samples", {})
    every = (_result(name, of, samples.get(name, [])) for name, of in found["results"].items())
    results = [result for result in every if result.metrics]  # a group may have none of its own
    if not results:
        raise ScratchLMError(f"--lm-eval {', '.join(tasks)}: the harness gave no figures")
    return results


def _evaluate(**options: Any) -> dict[str, Any]:
    """Call the harness; it asks git about the current folder, whose complaint is nobody's news."""
    asks_git = harness.get_git_commit_hash
    harness.get_git_commit_hash = lambda: None
    try:
        found: dict[str, Any] = harness.simple_evaluate(**options)
        return found
    finally:
        harness.get_git_commit_hash = asks_git


def _manager(tasks: Sequence[str], include_path: str | None) -> TaskManager:
    """Find the tasks; the harness's own thousands only where the folder has not all of them."""
    if include_path is not None:
        own = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            near = did_you_mean(task, manager.all_tasks)
            raise ScratchLMError(f"--lm-eval {task}: the harness knows no such task{near}")
    return manager


def _result(name: str, figures: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> Result:
    metrics = {}
    for key, value in figures.items():
        metric, _, made_by = key.partition(",")
        if metric.endswith("_stderr") or not isinstance(value, int | float) or not made_by:
            continue
        error: Any = figures.get(f"{metric}_stderr,{made_by}")
        shown = metric if made_by == "none" else f"{metric} ({made_by})"
        ends: list[float | None] = [None, None]
        if isinstance(error, int | float) and error > 0:  # 0: the same in every case
            ends = [value - Z * error, value + Z * error]
        metrics[shown] = Estimate(float(value), *ends)
    cases = [
        {"id": sample["doc_id"], "answers": sample["filtered_resps"], "target": sample["target"]}
        for sample in samples
    ]
    return Result(name, "lm-eval", metrics, {"cases": len(cases)}, cases)
