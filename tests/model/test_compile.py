"""Everything compiles into one graph, and gives what the uncompiled model gives."""

import pytest
import torch

from scratchlm.model import QuestionAnswering, SequenceClassifier
from tiny_models import FAMILIES, build, ids

CLOSE = {"atol": 2e-5, "rtol": 2e-4}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def one_layer(family, ops="fast"):
    return build(FAMILIES[family].replace(num_layers=1), ops, dtype=torch.float32)


def compiled(module, traced=True):
    # The front end and autograd's tracer, without a C++ compiler: what `fullgraph` is about.
    return torch.compile(module, fullgraph=True, backend="aot_eager" if traced else "eager")


# Every op is in one of these; the other families differ in what the front end reads.
TRACED = ("plain", "qwen3", "gpt2", "mistral", "mixtral", "no positions")


@pytest.mark.parametrize(
    ("ops", "family", "traced"),
    [("fast", family, family in TRACED) for family in FAMILIES]
    + [("reference", family, True) for family in ("plain", "gpt2")]
    + [("reference", "mixtral", False)]
    + [pytest.param("reference", "mixtral", True, marks=pytest.mark.slow)],
)
def test_forward_and_backward_compile_into_one_graph(family, ops, traced):
    model = one_layer(family, ops)
    tokens = ids(2, 8)
    # The reference's loop over experts asks which tokens chose one: a shape that depends on data.
    depends = family == "mixtral" and ops == "reference"
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=depends):
        loss = compiled(model.loss, traced)(tokens, tokens.roll(-1, 1))
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model.loss(tokens, tokens.roll(-1, 1))
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    for ours, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
def test_cached_decoding_compiles_into_one_graph(family):
    model = one_layer(family)
    tokens = ids(2, 6)
    step, cache = compiled(model), model.new_cache(2)
    with torch.no_grad():
        outputs = [step(tokens[:, :3], cache=cache)]
        outputs += [step(tokens[:, i : i + 1], cache=cache) for i in range(3, 6)]
        torch.testing.assert_close(torch.cat(outputs, 1), model(tokens), **CLOSE)


def test_padding_documents_and_positions_compile():
    model = one_layer("llama")
    tokens, step = ids(2, 6), compiled(model)
    mask = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)
    for context in (
        {"attention_mask": mask},
        {"document_ids": documents},
        {"positions": torch.arange(6).flip(0)},
    ):
        torch.testing.assert_close(step(tokens, **context), model(tokens, **context), **CLOSE)


def test_heads_compile():
    config, tokens = FAMILIES["plain"], ids(2, 6)
    classifier, reader = SequenceClassifier(config, 3), QuestionAnswering(config)
    torch.testing.assert_close(compiled(classifier)(tokens), classifier(tokens), **CLOSE)
    torch.testing.assert_close(compiled(reader)(tokens).start, reader(tokens).start, **CLOSE)


def test_the_default_backend_gives_the_same_training_step():
    model = one_layer("plain")
    tokens = ids(2, 8)
    loss = torch.compile(model.loss, fullgraph=True)(tokens, tokens.roll(-1, 1))
    torch.testing.assert_close(loss, model.loss(tokens, tokens.roll(-1, 1)), **CLOSE)
