"""Task heads beside transformers: they come in and go out with equal logits, padded or not."""

import json

import pytest
import torch
import transformers

from interop.hf_models import HF_CONFIGS
from scratchlm.config.heads import TaskHead
from scratchlm.errors import ScratchLMError
from scratchlm.inference.heads import load_head, make_head
from scratchlm.interop import read_hf, write_hf
from tiny_models import FAMILIES, build

NAMES = ("llama 3.1", "llama 3.2", "qwen2", "qwen3", "mistral", "gpt2")
KINDS = {"classification": "SequenceClassification", "qa": "QuestionAnswering"}
PAD = 7


def their_class(config, kind):
    name = type(config).__name__.removesuffix("Config")
    return getattr(transformers, f"{name}For{KINDS[kind]}")


def save(name, kind, path):
    """Make a tiny random model of transformers', every parameter random, and save it."""
    config = HF_CONFIGS[name]()
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD, None, None
    if kind == "classification":
        config.id2label = {0: "bad", 1: "so-so", 2: "good"}
        config.label2id = {label: i for i, label in config.id2label.items()}
    torch.manual_seed(0)
    model = their_class(config, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model


def rows(side):
    """Return ids and a mask of rows of several lengths; none has the padding's id inside."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, 61, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.bool)
    for row, missing in enumerate((0, 4, 9)):
        gone = slice(11 - missing, 11) if side == "right" else slice(0, missing)
        ids[row, gone], mask[row, gone] = PAD, False
    return ids, mask


def theirs_on(model, kind, ids, mask):
    # GPT-2 counts padding as positions unless told otherwise
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        out = model(ids, attention_mask=mask.long(), position_ids=positions)
    if kind == "classification":
        return [out.logits]
    return [logits[mask] for logits in (out.start_logits, out.end_logits)]


def ours_on(model, kind, ids, mask):
    with torch.inference_mode():
        out = model(ids, attention_mask=mask)
    return [out] if kind == "classification" else [logits[mask] for logits in (out.start, out.end)]


def assert_same(ours, theirs, kind):
    for side in ("right", "left"):
        ids, mask = rows(side)
        found, expected = ours_on(ours, kind, ids, mask), theirs_on(theirs, kind, ids, mask)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_directory_with_a_head_comes_in_and_goes_out_with_equal_logits(name, kind, tmp_path):
    theirs = save(name, kind, tmp_path / "theirs")
    loaded = load_head(tmp_path / "theirs")
    assert loaded.head.kind == kind
    assert loaded.head.labels == (("bad", "so-so", "good") if kind == "classification" else ())
    assert_same(loaded.model, theirs, kind)
    source = read_hf(tmp_path / "theirs", with_head=True)
    assert source.pad_token_id == PAD
    write_hf(
        tmp_path / "ours",
        loaded.config,
        loaded.model.state_dict(),
        head=loaded.head,
        pad_token_id=PAD,
    )
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    assert_same(loaded.model, again, kind)
    table = json.loads((tmp_path / "ours/config.json").read_text())
    assert table["architectures"] == [type(theirs).__name__]
    if kind == "classification":
        assert again.config.id2label == {0: "bad", 1: "so-so", 2: "good"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trunk_of_ours_goes_out_with_its_rope_in_either_layout(kind, tmp_path):
    config = FAMILIES["plain"]  # interleaved
    head = TaskHead(kind, ("a", "b") if kind == "classification" else ())
    model = make_head(config, head).eval()
    with torch.no_grad():
        model.get_submodule("score" if head.labels else "span").weight.normal_()
    write_hf(tmp_path / "out", config, model.state_dict(), head=head, pad_token_id=PAD)
    theirs = transformers.AutoModelForSequenceClassification
    if kind == "qa":
        theirs = transformers.AutoModelForQuestionAnswering
    theirs = theirs.from_pretrained(tmp_path / "out").eval()
    ids, mask = rows("right")
    ids, mask = ids[:1] % 29, mask[:1]  # without padding: its id is among these
    found, expected = ours_on(model, kind, ids, mask), theirs_on(theirs, kind, ids, mask)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_what_is_no_head_is_refused_by_name(tmp_path):
    save("llama 3.1", "classification", tmp_path / "theirs")
    with pytest.raises(ScratchLMError, match=r"architectures must be \['LlamaForCausalLM'\]"):
        read_hf(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    table = json.loads(path.read_text())
    for change, told in (
        ({"problem_type": "regression"}, "problem_type must be single_label"),
        ({"id2label": {"0": "a"}}, "id2label must name two labels"),
        ({"id2label": {"0": "a", "2": "b"}}, "from 0 on"),
        ({"id2label": {"0": "a", "1": "a", "2": "b"}}, "labels must differ"),
        ({"id2label": {"0": "a", "1": "b"}}, r"score.weight must be \[2, 32\], got \[3, 32\]"),
    ):
        path.write_text(json.dumps({**table, **change}))
        with pytest.raises(ScratchLMError, match=told):
            load_head(tmp_path / "theirs")
    model = build(FAMILIES["llama"], dtype=torch.float32)
    write_hf(tmp_path / "lm", model.config, model.state_dict())
    with pytest.raises(ScratchLMError, match="a language model, without a task head"):
        load_head(tmp_path / "lm")
    mixtral = FAMILIES["mixtral"]
    with pytest.raises(ValueError, match="task heads are known of llama"):
        write_hf(tmp_path / "moe", mixtral, {}, head=TaskHead("qa"))
