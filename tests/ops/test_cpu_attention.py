"""Our own causal attention on a CPU: its numbers, where it applies, and how it is built."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

from scratchlm.ops import OPS, CausalMask, attention, native, reference

needs_kernel = pytest.mark.skipif(native.library() is None, reason=f"{native.why_not()}")
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)


def op():
    from scratchlm.ops.cpu_attention import causal_attention

    return causal_attention


def inputs(batch, heads, seq, width, key_heads=None, spread=1.0):
    """Return q, k, v as a model makes them: (batch, seq, heads, d_head), its heads cut out."""
    counts = (heads, key_heads or heads, key_heads or heads)
    shapes = [(batch, seq, count, width) for count in counts]
    scales = (spread, 1.0, 1.0)
    made = (torch.randn(shape) * by for shape, by in zip(shapes, scales, strict=True))
    return [x.transpose(1, 2).requires_grad_() for x in made]


def with_gradients(attend, tensors, grad_output):
    out = attend(*tensors)
    return [out, *torch.autograd.grad(out, tensors, grad_output)]


def truth(tensors, grad_output):
    """The definition's output and gradients, in float64."""
    wide = [x.detach().double().requires_grad_() for x in tensors]
    return with_gradients(
        lambda *x: reference.attention(*x, CausalMask()), wide, grad_output.double()
    )


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def ours(q, k, v):
    return op()(q, k, v)[0]


@needs_kernel
@pytest.mark.parametrize(
    ("shape", "key_heads"),
    [
        ((2, 3, 97, 32), 3),
        ((1, 2, 257, 64), 2),
        ((1, 2, 130, 128), 1),
        ((2, 6, 96, 16), 2),
        ((1, 4, 101, 24), 1),  # not whole panels
        ((1, 2, 100, 20), 2),  # not whole vectors
        ((2, 2, 1, 32), 2),
        ((1, 1, 7, 8), 1),
        ((0, 2, 5, 8), 2),
    ],
    ids=str,
)
def test_output_and_gradients_are_the_definition_s(shape, key_heads):
    tensors = inputs(*shape, key_heads)
    grad_output = torch.randn(shape)
    for got, wanted in zip(
        with_gradients(ours, tensors, grad_output), truth(tensors, grad_output), strict=True
    ):
        assert got.shape == wanted.shape
        if got.numel() and wanted.norm() > 0:
            assert error(got, wanted) < 1e-6
        else:  # of a single token, the score's gradient is 0
            assert (got.abs() < 1e-5).all()


@needs_kernel
@pytest.mark.parametrize("length", range(85, 120))
def test_every_remainder_of_a_tile_is_right(length):
    tensors, grad_output = inputs(1, 1, length, 8), torch.randn(1, 1, length, 8)
    for got, wanted in zip(
        with_gradients(ours, tensors, grad_output), truth(tensors, grad_output), strict=True
    ):
        torch.testing.assert_close(got.double(), wanted.double(), atol=1e-5, rtol=1e-5)


@needs_kernel
def test_large_scores_neither_overflow_nor_lose_precision():
    """Scores of some hundreds, of which nearly all weights vanish."""
    tensors, grad_output = inputs(1, 2, 130, 32, spread=80.0), torch.randn(1, 2, 130, 32)
    scores = (tensors[0] @ tensors[1].mT).abs().max() / math.sqrt(32)
    assert scores > 200
    for got, wanted in zip(
        with_gradients(ours, tensors, grad_output), truth(tensors, grad_output), strict=True
    ):
        # A score of 2⁸ is known to 2⁻¹⁶ in float32, and so is its exponential, relatively.
        assert error(got, wanted) < 1e-4


@needs_kernel
def test_it_is_as_exact_as_torch_s_own():
    tensors, grad_output = inputs(2, 4, 256, 32), torch.randn(2, 4, 256, 32)
    exact = truth(tensors, grad_output)

    def torchs(*x):
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)

    mine, theirs = (with_gradients(way, tensors, grad_output) for way in (ours, torchs))
    for a, b, wanted in zip(mine, theirs, exact, strict=True):
        assert error(a, wanted) < 2 * error(b, wanted)


@needs_kernel
def test_any_layout_in_memory_is_read_right():
    q, k, v = (x.detach() for x in inputs(2, 2, 99, 16))
    wanted = ours(q, k, v)
    by_channels = q.mT.contiguous().mT
    shifted = torch.cat((k[..., :3], k), dim=-1)[..., 3:]  # at no aligned address
    assert by_channels.stride(-1) != 1
    assert torch.equal(ours(by_channels, shifted, v.contiguous()), wanted)
    one = k[:, :1].expand(2, 2, 99, 16)
    assert torch.equal(ours(q, one, v), ours(q, one.contiguous(), v))


@needs_kernel
@pytest.mark.parametrize("wrong", [1e4, math.nan, math.inf], ids=str)
def test_the_future_changes_nothing_of_the_past(wrong):
    """Not a bit of the output, whatever stands there; and a past loss pulls at no future token."""
    tensors, grad_output = inputs(1, 2, 150, 32), torch.randn(1, 2, 150, 32)
    before = ours(*tensors)
    for seen in (0, 5, 99, 140):
        changed = [x.detach().clone() for x in tensors]
        for x in changed:
            x[:, :, seen + 1 :] = wrong
        assert torch.equal(ours(*changed)[:, :, : seen + 1], before[:, :, : seen + 1])
        grad_of_past = grad_output.clone()
        grad_of_past[:, :, seen + 1 :] = 0
        for grad in torch.autograd.grad(ours(*tensors), tensors, grad_of_past):
            assert (grad[:, :, seen + 1 :] == 0).all()


@needs_kernel
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_a_nan_comes_out_where_it_was_looked_at_and_nowhere_else(which):
    tensors = [x.detach() for x in inputs(2, 2, 150, 32)]
    tensors[which][1, 0, 103, 7] = math.nan
    leaves = [x.requires_grad_() for x in tensors]
    out, of_q, of_k, of_v = with_gradients(ours, leaves, torch.ones(2, 2, 150, 32))
    clean = torch.ones(2, 2, dtype=torch.bool)
    clean[1, 0] = False
    for x in (out, of_q, of_k, of_v):
        assert x[clean].isfinite().all()
    rows = out[1, 0].isnan().any(dim=-1)
    assert rows[103]
    assert not rows[:103].any()
    assert rows[104:].all() if which else not rows[104:].any()
    assert not of_q[1, 0, :103].isnan().any()
    assert of_k[1, 0, :104].isnan().any()


@needs_kernel
@pytest.mark.parametrize(
    ("shape", "key_heads"),
    [((3, 4, 120, 32), 2), ((1, 3, 500, 16), 1), ((1, 1, 300, 32), 1)],  # some heads shared out
)
def test_the_number_of_threads_changes_no_bit(monkeypatch, shape, key_heads):
    tensors, grad_output = inputs(*shape, key_heads=key_heads), torch.randn(shape)
    results = []
    for threads in (1, 2, 5, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(with_gradients(ours, tensors, grad_output))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_kernel
def test_results_lie_by_tokens_so_that_merging_heads_copies_nothing():
    tensors = inputs(2, 4, 100, 16, key_heads=2)
    for x in with_gradients(ours, tensors, torch.randn(2, 4, 100, 16)):
        x.detach().transpose(1, 2).flatten(-2).view(-1)
        assert x.transpose(1, 2).is_contiguous()


@needs_kernel
@pytest.mark.parametrize("grad", [True, False])
def test_torch_accepts_it_as_an_operation(grad):
    given = [x.detach().requires_grad_(grad) for x in inputs(1, 4, 5, 8, key_heads=2)]
    torch.library.opcheck(op(), given)


@needs_kernel
def test_compiled_whole_it_gives_the_same():
    tensors, grad_output = inputs(2, 4, 130, 32, key_heads=2), torch.randn(2, 4, 130, 32)

    def merged(q, k, v):
        out = OPS["fast"].attention(q * 2, k, v, CausalMask())
        return out.transpose(1, 2).flatten(-2).sin()

    plain = with_gradients(merged, tensors, grad_output.transpose(1, 2).flatten(-2))
    compiled = torch.compile(merged, fullgraph=True)
    for a, b in zip(
        with_gradients(compiled, tensors, grad_output.transpose(1, 2).flatten(-2)),
        plain,
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def takes_kernel(monkeypatch, *tensors):
    """Say whether our kernel was called for these."""
    from scratchlm.ops import cpu_attention

    calls, whole = [], cpu_attention.causal_attention
    monkeypatch.setattr(
        cpu_attention, "causal_attention", lambda *qkv: (calls.append(qkv), whole(*qkv))[1]
    )
    OPS["fast"].attention(*tensors, CausalMask())
    return len(calls) == 1


LONG = attention.TOKENS_FROM


@needs_kernel
def test_long_plain_float32_sequences_take_it_and_others_do_not(monkeypatch):
    assert takes_kernel(monkeypatch, *inputs(1, 2, LONG, 8))
    assert takes_kernel(monkeypatch, *inputs(1, 4, LONG, 8, key_heads=2))
    with torch.no_grad():
        assert takes_kernel(monkeypatch, *inputs(1, 2, LONG, 8))
    assert not takes_kernel(monkeypatch, *inputs(1, 2, LONG - 1, 8))
    assert not takes_kernel(monkeypatch, *inputs(1, 2, LONG, 136))
    assert not takes_kernel(monkeypatch, *(x.double() for x in inputs(1, 2, LONG, 8)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_kernel(monkeypatch, *inputs(1, 2, LONG, 8))


@pytest.mark.parametrize(
    ("q", "kv"),
    [
        ((1, 6, LONG, 8), (1, 4, LONG, 8)),
        ((1, 2, LONG, 8), (1, 4, LONG, 8)),
        ((1, 2, LONG, 16), (1, 2, LONG, 8)),
        ((3, 2, LONG, 8), (2, 2, LONG, 8)),
    ],
    ids=str,
)
@needs_kernel
def test_shapes_that_do_not_fit_each_other_are_refused(q, kv):
    q, k, v = torch.randn(q), torch.randn(kv), torch.randn(kv)
    with pytest.raises(RuntimeError):  # torch's own refusal
        OPS["fast"].attention(q, k, v, CausalMask())
    with pytest.raises(ValueError, match="must fit each other"):
        op()(q, k, v)
    with pytest.raises(ValueError, match="float32"):
        op()(*(x.double() for x in inputs(1, 2, LONG, 8)))


@needs_kernel
def test_derivatives_it_does_not_have_are_torch_s():
    """A closed operation knows its backward pass alone; forward-mode ones would be zeros."""
    tensors = [x.detach() for x in inputs(1, 2, 64, 8)]
    directions = tuple(torch.randn_like(x) for x in tensors)

    def attend(*x):
        return OPS["fast"].attention(*x, CausalMask())

    def by_definition(*x):
        return reference.attention(*x, CausalMask())

    _, got = torch.func.jvp(attend, tuple(tensors), directions)
    _, wanted = torch.func.jvp(by_definition, tuple(tensors), directions)
    assert error(got, wanted.double()) < 1e-5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], directions[0])
        got = torch.autograd.forward_ad.unpack_dual(attend(dual, *tensors[1:])).tangent
    assert got is not None
    got = torch.func.grad(lambda q: attend(q, *tensors[1:]).sum())(tensors[0])
    wanted = torch.func.grad(lambda q: by_definition(q, *tensors[1:]).sum())(tensors[0])
    assert error(got, wanted.double()) < 1e-5


@pytest.fixture
def fresh(monkeypatch):
    """Let the kernels be looked for anew, and forget what was found."""
    native._loaded.cache_clear()
    yield monkeypatch
    native._loaded.cache_clear()


def test_without_a_compiler_torch_s_own_attention_does_it(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(shutil, "which", lambda name: None)
    tensors, grad_output = inputs(1, 2, LONG, 8), torch.randn(1, 2, LONG, 8)

    def attend(*x):
        return OPS["fast"].attention(*x, CausalMask())

    assert native.library() is None
    assert "no C++ compiler" in native.why_not()
    for got, wanted in zip(
        with_gradients(attend, tensors, grad_output), truth(tensors, grad_output), strict=True
    ):
        assert error(got, wanted) < 1e-6


@needs_compiler
def test_a_compiler_that_fails_is_a_reason_not_an_error(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(native, "FLAGS", (*native.FLAGS, "-no-such-flag"))
    assert native.library() is None
    assert "no-such-flag" in native.why_not()
    assert os.listdir(tmp_path / "scratchlm") == []  # nothing half done is left


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702], ids=oct)
def test_a_folder_others_may_write_to_is_refused(fresh, tmp_path, mode):
    (tmp_path / "scratchlm").mkdir()
    (tmp_path / "scratchlm").chmod(mode)
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None
    assert "others may write" in native.why_not()


def test_without_a_home_nothing_is_built(fresh):
    fresh.delenv("XDG_CACHE_HOME", raising=False)
    fresh.setattr(os.path, "expanduser", lambda path: path)
    assert native.library() is None
    assert "no home" in native.why_not()


def test_a_folder_of_somebody_else_is_refused(fresh, tmp_path):
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert native.library() is None
    assert "others may write" in native.why_not()


def test_a_link_in_place_of_the_folder_is_refused(fresh, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "scratchlm").symlink_to(tmp_path / "elsewhere")
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.library() is None
    assert "is a link" in native.why_not()


@needs_compiler
def test_a_compiler_may_speak_any_language(fresh, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'nicht f\\374r mich' >&2\nexit 1\n")
    compiler.chmod(0o700)
    fresh.setenv("XDG_CACHE_HOME", str(tmp_path))
    fresh.setenv("CXX", str(compiler))
    assert native.library() is None
    assert "nicht f" in native.why_not()


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 4096, -1])
def test_half_a_library_is_made_again(monkeypatch, tmp_path, size):
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(native, "SOURCE", source)
    path = native.built(tmp_path / "kept")
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    assert native.built(tmp_path / "kept") == path
    assert path.read_bytes() == whole


BUILD = "from pathlib import Path; import sys; from scratchlm.ops import native; "
BUILD += "native.SOURCE = Path(sys.argv[2]); print(native.built(Path(sys.argv[1])))"


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path):
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    command = [sys.executable, "-c", BUILD, str(tmp_path / "kept"), str(source)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (path,) = said
    assert {os.path.basename(path)} == {
        name for name in os.listdir(tmp_path / "kept") if not name.endswith(".sha256")
    }
    assert os.stat(tmp_path / "kept").st_mode & 0o777 == 0o700


@needs_compiler
def test_another_source_or_processor_is_another_file(monkeypatch, tmp_path):
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(native, "SOURCE", source)
    first = native.built(tmp_path / "kept")
    made = first.stat().st_mtime_ns
    assert native.built(tmp_path / "kept") == first
    assert first.stat().st_mtime_ns == made
    monkeypatch.setattr(native, "_processor", lambda: "another")
    second = native.built(tmp_path / "kept")
    source.write_text('extern "C" int two() { return 2; }\n')
    assert len({first, second, native.built(tmp_path / "kept")}) == 3
