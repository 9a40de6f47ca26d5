"""What a run computes at every evaluation besides the loss: bits per byte, samples, tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from scratchlm.training import Plan
    from scratchlm.training.loop import RunTasks, Sampler


def bytes_of_ids(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Return how many bytes of text each id stands for; special tokens stand for none."""
    import torch

    table = torch.zeros(vocab_size, dtype=torch.int64)
    special = set(tokenizer.special_tokens.values())
    for token, text in tokenizer.vocab.items():
        if token < vocab_size and token not in special:
            table[token] = len(text)
    return table


def make_sampler(plan: Plan, tokenizer: Any, prompt: str | None) -> Sampler:
    """Return what continues a prompt: in the same way for the same weights and step."""
    from scratchlm.inference import Sampling
    from scratchlm.inference.prompts import default_eos_ids

    ids = tokenizer.encode(prompt) if prompt else list(default_eos_ids(tokenizer))[:1]
    sampling = Sampling(temperature=0.8)
    return _sampler(plan, tokenizer, ids or [0], prompt or "", 80, sampling=sampling)


def make_answerer(plan: Plan) -> Sampler:
    """Return what answers the first held-out prompt: the same for the same weights."""
    from scratchlm.data.examples import read_examples
    from scratchlm.inference import GREEDY
    from scratchlm.tokenizer import load_tokenizer

    assert plan.data.tokenizer is not None
    tokenizer = load_tokenizer(plan.data.tokenizer)
    ids, learns = read_examples(plan.data.val or plan.data.train)[0]
    prompt = ids[: max(1, int(learns.argmax()))].tolist()[-(plan.model.context_length // 2) :]
    ends = set(ids[learns.nonzero()[0][-1:]].tolist())
    text = tokenizer.decode(prompt)
    return _sampler(plan, tokenizer, prompt, text, 60, sampling=GREEDY, eos_ids=ends)


def _sampler(
    plan: Plan, tokenizer: Any, prompt: list[int], text: str, length: int, **options: Any
) -> Sampler:
    """Return what continues a prompt, of which half a context is read; `text`: it, as shown."""
    from scratchlm.inference import generate

    context = plan.model.context_length
    ids = prompt[-(context // 2) :]

    def sample(model: Any, step: int) -> list[str]:
        found = generate(
            model,
            [ids],
            tokenizer=tokenizer,
            max_new_tokens=min(length, context - len(ids)),
            seed=plan.train.seed + step,
            **options,
        )
        return [text + found[0].text]

    return sample


def make_task_runner(plan: Plan) -> RunTasks | None:
    """Read the tasks of a run, before anything is trained; return what runs them."""
    if not plan.train.task_files:
        return None
    if plan.data.tokenizer is None:
        raise ValueError("train.tasks needs the tokenizer of the data; there is none")
    from scratchlm.evaluation import Evaluator, read_task
    from scratchlm.inference import Loaded
    from scratchlm.inference.prompts import default_eos_ids
    from scratchlm.tokenizer import load_tokenizer
    from scratchlm.training.metrics import finite

    tasks = [read_task(path) for path in plan.train.task_files]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"train.tasks must be files of different names; got {', '.join(names)}")
    tokenizer, source = load_tokenizer(plan.data.tokenizer), plan.data.tokenizer
    ends = default_eos_ids(tokenizer)

    def run_tasks(model: Any) -> dict[str, dict[str, dict[str, float | None]]]:
        evaluator = Evaluator(Loaded(model, tokenizer, plan.model, source, ends))
        found = {}
        for task in tasks:
            figures = evaluator.run(task).to_dict()["metrics"]
            found[task.name] = {
                name: {end: finite(value) for end, value in figure.items()}
                for name, figure in figures.items()
            }
        return found

    return run_tasks
