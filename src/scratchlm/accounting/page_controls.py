"""The controls of the page: sizes and choices, with their limits.

A control carries the name of a config field or of a command-line option. A size that is not given
follows a formula (d_head = d_model / num_heads) until it is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from scratchlm.accounting.expr import Expr, Sym, ceil_div
from scratchlm.accounting.flops import CHECKPOINTING, CONVENTIONS
from scratchlm.accounting.machines import PRICES_AS_OF, Machine
from scratchlm.accounting.money import DEFAULT_MFU, TOKENS_PER_PARAMETER
from scratchlm.accounting.page_formulas import SUGGESTED_TOKENS, Formulas, number, variants
from scratchlm.accounting.setup import (
    DEFAULT_LENGTHS,
    MAX_SIZE,
    OPTIMIZERS,
    PARALLEL,
    PRECISIONS,
    Setup,
)
from scratchlm.accounting.symbols import SYMBOLS, H, d
from scratchlm.accounting.work import PHASES
from scratchlm.config import ModelConfig, MoE, default_d_ff
from scratchlm.config.parts import SIZE_LIMITS

_GENERATION = ("generation", "generation-no-cache")


@dataclass(frozen=True)
class Control:
    """One thing to set; `kind` is size, real, choice or flag."""

    key: str
    label: str
    kind: str
    value: Any  # None: it follows `link`
    symbol: str = ""
    link: Expr | None = None
    link_label: str = ""
    stops: tuple[int, ...] = ()  # where the slider snaps
    least: int = 1
    most: int | None = MAX_SIZE
    choices: tuple[tuple[str, str], ...] = ()  # value, words
    option: str = ""  # of the command line; "" for fields of the model
    plain: Any = None  # the default of that option
    when: dict[str, tuple[str, ...]] = field(default_factory=dict)  # shown for these values only
    words: str = ""

    def data(self, table: Formulas) -> dict[str, Any]:
        """Write as plain values."""
        return {
            "key": self.key,
            "label": self.label,
            "kind": self.kind,
            "value": number(self.value),
            "symbol": self.symbol,
            "link": None if self.link is None else table.expr(self.link),
            "linkLabel": self.link_label,
            "stops": self.stops,
            "least": self.least,
            "most": self.most,
            "choices": self.choices,
            "option": self.option,
            "plain": number(self.plain),
            "when": self.when,
            "words": self.words or SYMBOLS.get(self.symbol, ""),
        }


def _doublings(most: int, least: int = 1) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, … : doublings and what lies half way."""
    powers = [2**i for i in range(most.bit_length())]
    values = {*powers, *(3 * power for power in powers)}
    return tuple(sorted(value for value in values if least <= value <= most))


def _widths(most: int) -> tuple[int, ...]:
    """Multiples of 64, ever coarser: about 8 steps for a doubling."""
    values, width = [], 64
    while width <= most:
        values.append(width)
        width += max(64, 2 ** (width.bit_length() - 4))
    return tuple(values)


def _counts(fine: int, most: int) -> tuple[int, ...]:
    """Every number up to `fine`, then multiples of 4."""
    return (*range(1, fine + 1), *range(fine + 4, most + 1, 4))


def _with(stops: tuple[int, ...], value: int | None) -> tuple[int, ...]:
    return stops if value is None else tuple(sorted({*stops, value}))


@dataclass(frozen=True)
class Money:
    """Assumptions about a training run; None: suggested tokens, the machine's price and link."""

    tokens: int | None = None
    mfu: float = DEFAULT_MFU
    price: float | None = None
    link: float | None = None  # GB/s


def groups(
    config: ModelConfig,
    setup: Setup,
    convention: str,
    gpu: Machine,
    machines: list[Machine],
    money: Money,
) -> dict[str, list[Control]]:
    """Return all controls, in the order they are shown."""
    return {
        "The work": _work(config, setup, convention),
        "The model": _model(config),
        "Numbers and memory": _training(setup),
        "Machines": _machines(setup, gpu, machines, money.link),
        "A training run": _run(money),
    }


def _work(config: ModelConfig, setup: Setup, convention: str) -> list[Control]:
    seq = setup.context or config.context_length
    lengths = _with(_doublings(2**20, 16), seq)

    def length(
        key: str, label: str, symbol: str, value: int | None, link_label: str, **more: Any
    ) -> Control:
        link = DEFAULT_LENGTHS[symbol]
        return _size(key, label, symbol, value, lengths, link=link, link_label=link_label, **more)

    read = {"phase": ("prefill", *_GENERATION)}
    rest = "the rest of the context"
    context = {"link": Sym("N_ctx"), "link_label": "context_length"}
    return [
        _choice("phase", "phase", PHASES, setup.phase, "forward"),
        _size("batch", "batch", "B", setup.batch, _doublings(4096), plain=1),
        _size("context", "context", "S", setup.context, lengths, **context),
        length("prompt", "prompt", "P", setup.prompt, "half the context", when=read),
        length(
            "new_tokens", "new tokens", "T", setup.new_tokens, rest, when={"phase": _GENERATION}
        ),
        length("cache", "cache", "C", setup.cache, "context − 1", least=0),
        _choice("convention", "convention", CONVENTIONS, convention, "full"),
    ]


def _model(config: ModelConfig) -> list[Control]:
    moe = config.ffn if isinstance(config.ffn, MoE) else None
    experts = moe or variants(config)["moe"].ffn
    assert isinstance(experts, MoE)
    kind = "moe" if moe else "dense"
    only_moe = {"ffn": ("moe",)}
    linked_head = config.d_head * config.num_heads == config.d_model
    linked_kv = config.num_kv_heads == config.num_heads
    heads = _with(_counts(64, 256), config.num_heads)
    controls = [
        _field("num_layers", "layers", "L", config.num_layers, _counts(64, 256)),
        _field("d_model", "width", "d", config.d_model, _widths(2**15)),
        _field("num_heads", "heads", "H", config.num_heads, heads),
        _field(
            "num_kv_heads",
            "kv heads",
            "H_kv",
            None if linked_kv else config.num_kv_heads,
            _with(heads, config.num_kv_heads),
            link=H,
            link_label="heads",
        ),
        _field(
            "d_head",
            "head width",
            "d_h",
            None if linked_head else config.d_head,
            _with(tuple(range(8, 513, 8)), config.d_head),
            link=d / H,
            link_label="width / heads",
        ),
        _field("d_ff", "feed-forward", "d_ff", None, _widths(2**17), **_ff_link(config)),
        _choice(
            "ffn",
            "feed-forward layer is",
            ("dense", "moe"),
            kind,
            None,
            option="",
            labels=("dense", "mixture of experts"),
        ),
        _field("num_experts", "experts", "E", experts.num_experts, _counts(64, 512), when=only_moe),
        _field(
            "experts_per_token",
            "experts per token",
            "k",
            experts.experts_per_token,
            _counts(16, 64),
            when=only_moe,
        ),
        _field("vocab_size", "vocabulary", "V", config.vocab_size, _doublings(2**19, 256)),
        _field(
            "context_length",
            "context_length",
            "N_ctx",
            config.context_length,
            _doublings(2**20, 16),
        ),
    ]
    if config.attention.sliding_window is not None:
        window = config.attention.sliding_window
        controls.append(_field("sliding_window", "window", "W", window, _doublings(2**17, 16)))
    tied = Control("tie_embeddings", "tie embeddings", "flag", config.tie_embeddings)
    return [*controls, tied]


def _ff_link(config: ModelConfig) -> dict[str, Any]:
    """Keep the ratio of d_ff to d_model."""
    if config.d_ff == default_d_ff(config.d_model):
        return {"link": 64 * ceil_div(8 * d, 192), "link_label": "8/3 width, up to 64s"}
    ratio = config.d_ff / config.d_model
    if config.d_ff % config.d_model == 0:
        link: Expr = (config.d_ff // config.d_model) * d
    else:
        link = ceil_div(config.d_ff * d, config.d_model)
    return {"link": link, "link_label": f"{ratio:.3g} × width"}


def _training(setup: Setup) -> list[Control]:
    execution = setup.execution
    return [
        _choice("dtype", "dtype", tuple(PRECISIONS), setup.precision, "bf16-mixed"),
        _choice("optimizer", "optimizer", OPTIMIZERS, setup.optimizer, "adamw"),
        _choice(
            "checkpointing",
            "checkpointing",
            CHECKPOINTING,
            execution.checkpointing,
            "none",
            words="what the backward pass computes again instead of keeping it",
        ),
        _choice(
            "attention",
            "attention",
            ("fused", "unfused"),
            execution.attention,
            "fused",
            words="unfused: the table of scores is written to memory",
        ),
        _choice(
            "loss",
            "loss",
            ("fused", "unfused"),
            execution.loss,
            "fused",
            words="unfused: all logits are formed at once, and kept for the backward pass",
        ),
        Control(
            "accumulate",
            "accumulate gradients",
            "flag",
            setup.accumulate,
            option="--accumulate",
            plain=False,
            words="gradients live from step to step",
        ),
    ]


def _machines(
    setup: Setup, gpu: Machine, machines: list[Machine], link: float | None
) -> list[Control]:
    names = tuple(machine.name for machine in machines)
    labels = tuple(
        f"{machine.name} · {machine.memory / 2**30:.0f} GiB · {machine.bandwidth / 1e12:.3g} TB/s"
        for machine in machines
    )
    not_tp = {"parallel": tuple(name for name in PARALLEL if name != "tp")}
    between = "the GPU's; between nodes 50"
    return [
        _choice("gpu", "GPU", names, gpu.name, "h100-sxm", labels=labels),
        _size("gpus", "GPUs", "G", setup.gpus, _doublings(2**14), plain=1),
        _choice(
            "parallel",
            "spread by",
            PARALLEL,
            setup.parallel,
            "none",
            words="none: several GPUs are data-parallel (zero1)",
        ),
        _size("tp", "tensor parallel", "G_t", setup.tp or 1, _doublings(64), plain=1, when=not_tp),
        _size(
            "micro_batches", "micro-batches", "m", setup.micro_batches, _doublings(1024), plain=1
        ),
        _real("link", "GB/s out of a GPU", "link", link, link=Sym("list_link"), link_label=between),
    ]


def _run(money: Money) -> list[Control]:
    tokens: dict[str, Any] = {
        "link": SUGGESTED_TOKENS,
        "link_label": f"{TOKENS_PER_PARAMETER} per parameter",
    }
    price = {"link": Sym("list_price"), "link_label": f"{PRICES_AS_OF}, rough"}
    return [
        _size("tokens", "tokens", "D", money.tokens, most=None, **tokens),
        _real("mfu", "assumed MFU", "u", money.mfu, most=1, plain=DEFAULT_MFU),
        _real("price", "$ per GPU-hour", "price", money.price, **price),
    ]


def _choice(
    key: str,
    label: str,
    values: tuple[str, ...],
    value: str,
    plain: str | None,
    labels: tuple[str, ...] = (),
    option: str | None = None,
    words: str = "",
) -> Control:
    return Control(
        key,
        label,
        "choice",
        value,
        choices=tuple(zip(values, labels or values, strict=True)),
        option=_option(key) if option is None else option,
        plain=plain,
        words=words,
    )


def _size(
    key: str, label: str, symbol: str, value: int | None, stops: tuple[int, ...] = (), **more: Any
) -> Control:
    """Make a whole number of the command line; sliders stop at its value, too."""
    stops = _with(stops, value) if stops else ()
    return Control(key, label, "size", value, symbol, stops=stops, option=_option(key), **more)


def _real(key: str, label: str, symbol: str, value: float | None, **more: Any) -> Control:
    return Control(key, label, "real", value, symbol, option=_option(key), **more)


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _field(
    key: str, label: str, symbol: str, value: int | None, stops: tuple[int, ...], **more: Any
) -> Control:
    """Make a size of the model."""
    stops = _with(stops, value)
    return Control(key, label, "size", value, symbol, stops=stops, most=SIZE_LIMITS[key], **more)
