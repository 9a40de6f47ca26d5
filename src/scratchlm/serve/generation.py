"""From the fields of a request to rows for the engine: everything checked, nothing run yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scratchlm.inference.loading import Loaded
from scratchlm.inference.prompts import encode_prompt
from scratchlm.inference.requests import make_rows
from scratchlm.inference.rows import Row
from scratchlm.inference.sampling import Sampling
from scratchlm.serve.chat_prompts import ChatPrompts, check_length
from scratchlm.serve.refusals import Refusal, bad_field

MOST_ECHOED = 1 << 22  # log-probabilities of prompts in one answer: about 1 GB while it is written
SAMPLING = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias"),
)


@dataclass(frozen=True)
class Generate:
    """One request to generate: rows for the engine, and how the answer is to look."""

    prompts: list[list[int]]  # of each choice
    texts: list[str | None]  # of each choice, where its prompt was a text
    rows: list[Row]  # of each choice; none where nothing is to be generated
    num_prompts: int
    num_logprobs: int | None
    is_chat: bool
    stream: bool
    include_usage: bool
    echo: bool
    return_token_ids: bool
    salt: str

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts, each counted once."""
        step = len(self.prompts) // self.num_prompts
        return sum(map(len, self.prompts[::step]))


def completion_request(values: dict[str, Any], loaded: Loaded, most_choices: int) -> Generate:
    """Make the request of `/v1/completions`."""
    prompts: list[str | list[int]] = values["prompt"]
    ids = [
        encode_text(loaded, p, "prompt", special=values["add_special_tokens"])
        if isinstance(p, str)
        else p
        for p in prompts
    ]
    for one in ids:
        if not one:
            raise bad_field("prompt", "must hold at least one token; got an empty one")
    if not values["add_special_tokens"] and not any(isinstance(p, str) for p in prompts):
        raise bad_field("add_special_tokens", "has no effect on token ids")
    if values["max_tokens"] == 0 and not values["echo"]:
        raise bad_field("max_tokens", "0 needs echo; got echo=false")
    if values["best_of"] not in (None, values["n"]):
        raise bad_field("best_of", f"must be n, {values['n']}; got {values['best_of']}")
    if values["echo"] and values["logprobs"] is not None:
        count = sum(map(len, ids)) * values["n"] * (1 + values["logprobs"])
        if count > MOST_ECHOED:
            rule = f"with echo an answer may hold {MOST_ECHOED} of them; asked for {count}"
            raise bad_field("logprobs", rule)
    texts = [p if isinstance(p, str) else None for p in prompts]
    return _generate(
        values,
        loaded,
        ids,
        texts,
        most_choices=most_choices,
        limit_name="max_tokens",
        limit=values["max_tokens"],
        num_logprobs=values["logprobs"],
        echo=values["echo"],
    )


def chat_request(
    values: dict[str, Any], loaded: Loaded, chat: ChatPrompts, most_choices: int
) -> Generate:
    """Make the request of `/v1/chat/completions`."""
    ids = chat.encode(values["messages"], values["chat_template_kwargs"])
    older, newer = values["max_tokens"], values["max_completion_tokens"]
    if older is not None and newer is not None and older != newer:
        raise bad_field("max_tokens", f"{older} contradicts max_completion_tokens={newer}")
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise bad_field("top_logprobs", "needs logprobs=true")
    return _generate(
        {**values, "stop": [*values["stop"], *chat.stop]},
        loaded,
        [ids],
        [None],
        most_choices=most_choices,
        limit_name="max_completion_tokens" if older is None else "max_tokens",
        limit=older if older is not None else newer,
        num_logprobs=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        end_ids=chat.end_ids(),
    )


def _generate(
    values: dict[str, Any],
    loaded: Loaded,
    prompts: list[list[int]],
    texts: list[str | None],
    *,
    most_choices: int,
    limit_name: str,
    limit: int | None,
    num_logprobs: int | None,
    echo: bool = False,
    end_ids: set[int] | None = None,
) -> Generate:
    n, context = values["n"], loaded.config.context_length
    if n * len(prompts) > most_choices:
        raise bad_field("n", f"prompts × n must not exceed {most_choices}; got {n * len(prompts)}")
    if values["stream_options"] is not None and not values["stream"]:
        raise bad_field("stream_options", "needs stream=true")
    if values["stop"] and loaded.tokenizer is None:
        raise bad_field("stop", "the model has no tokenizer")
    if num_logprobs is not None and num_logprobs > loaded.config.vocab_size:
        raise bad_field("logprobs", f"the model has {loaded.config.vocab_size} tokens")
    for one in prompts:
        room = context - len(one)
        if room < (1 if limit is None else limit):
            raise Refusal(
                400,
                f"{limit_name}: prompt and answer must fit the context of {context} tokens; "
                f"got {len(one)} + {1 if limit is None else limit}",
                field=limit_name,
                code="context_length_exceeded",
            )
    repeated, sampling = [one for one in prompts for _ in range(n)], _sampling(values)
    rows = []
    if limit != 0:
        rows = _rows(values, loaded, repeated, limit, end_ids, sampling)
    return Generate(
        prompts=repeated,
        texts=[one for one in texts for _ in range(n)],
        rows=rows,
        num_prompts=len(prompts),
        num_logprobs=num_logprobs,
        is_chat=end_ids is not None,
        stream=values["stream"],
        include_usage=bool((values["stream_options"] or {}).get("include_usage")),
        echo=echo,
        return_token_ids=values["return_token_ids"],
        salt=values["user"] or "",
    )


def _sampling(values: dict[str, Any]) -> Sampling:
    options = {name: values[name] for name in SAMPLING}
    top_k = values["top_k"]
    try:
        return Sampling(
            **options,
            typical=values["typical_p"],
            top_k=top_k if top_k is not None and top_k > 0 else None,
        )
    except (ValueError, TypeError) as error:
        name = next((name for name in (*SAMPLING, "typical_p") if name in str(error)), None)
        raise Refusal(400, str(error), field=name) from None


def _rows(
    values: dict[str, Any],
    loaded: Loaded,
    prompts: list[list[int]],
    limit: int | None,
    end_ids: set[int] | None,
    sampling: Sampling,
) -> list[Row]:
    ends = set(loaded.eos_ids) if end_ids is None else end_ids
    if values["ignore_eos"]:
        ends = set()
    return make_rows(
        prompts,
        loaded.config,
        tokenizer=loaded.tokenizer,
        max_new_tokens=limit,
        sampling=sampling,
        stop=values["stop"],
        eos_ids=ends | set(values["stop_token_ids"]),
        seed=values["seed"],
        past_context="error",
    )


def encode_text(loaded: Loaded, text: str, field: str, *, special: bool = True) -> list[int]:
    """Encode a text to be continued; refuse one that can only be longer than the context."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise bad_field(field, "must be token ids: the model has no tokenizer")
    check_length(loaded, len(text), field)
    try:
        return encode_prompt(tokenizer, text) if special else tokenizer.encode(text)
    except ValueError as error:  # a character that the tokenizer does not know
        raise bad_field(field, str(error)) from None
