"""The Q, K, V projection with fused RoPE: its packed tables and, on a GPU, the kernel.

What is around it, and its gradients: `test_attention_backward_kernel.py`.
"""

import pytest
import torch

from accelerate.gpu import on_hopper, relative_error
from accelerate.qkv_rope_formula import LAYOUTS, random_tables, unpack_tables
from scratchlm.accelerate.kernels.hopper.qkv_rope import qkv_rope_gemm, rope_tables
from scratchlm.ops import reference


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 32), (3, 1, 128, 32), (256, 32)])
def test_packed_tables_hold_every_value_where_its_thread_reads_it(layout, shape):
    cos, sin = random_tables(*shape)
    tables = rope_tables(cos, sin, layout == "interleaved")
    assert tables.is_contiguous()
    got = unpack_tables(tables, layout == "interleaved")
    torch.testing.assert_close(got[0], cos.reshape(-1, 32), atol=0, rtol=0)
    torch.testing.assert_close(got[1], sin.reshape(-1, 32), atol=0, rtol=0)


# On a Hopper GPU


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "positions", "d"),
    [((2, 2), 128, 64), ((3, 1), 384, 128), ((5, 5), 768, 320), ((8, 2), 768, 64)],
)
def test_the_kernel_equals_its_formula(num_heads, positions, d, layout, programs):
    tokens, columns = 768, (num_heads[0] + 2 * num_heads[1]) * 64
    x = torch.randn(tokens, d, device="cuda").bfloat16()
    w = (torch.randn(columns, d, device="cuda") * d**-0.5).bfloat16()
    cos, sin = (table.cuda() for table in random_tables(positions, 32))
    interleaved, rotated = layout == "interleaved", sum(num_heads)
    tables = rope_tables(cos, sin, interleaved)
    got = qkv_rope_gemm(x, w, tables, rotated * 64, interleaved, programs)
    rows = (x.double() @ w.double().t()).view(-1, positions, columns // 64, 64).transpose(1, 2)
    qk = reference.rope(rows[:, :rotated], cos.double(), sin.double(), layout)
    expected = torch.cat((qk, rows[:, rotated:]), dim=1).transpose(1, 2)
    assert relative_error(got, expected.reshape(tokens, columns)) < 3e-3
    for _ in range(3):  # a race would show
        again = qkv_rope_gemm(x, w, tables, rotated * 64, interleaved, programs)
        assert torch.equal(again, got)
