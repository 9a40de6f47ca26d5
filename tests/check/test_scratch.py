"""--from-scratch reads the code, refuses what the course forbids, and says where."""

import pytest

from scratchlm.check.scratch import find_refused


@pytest.fixture
def refused(tmp_path):
    def read(text):
        path = tmp_path / "my_ops.py"
        path.write_text(text, encoding="utf-8")
        return [(found.line, found.name) for found in find_refused(path)]

    return read


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch.nn.functional as F\n", [(1, "torch.nn.functional")]),
        (
            "from torch.nn import functional as F\ny = F.softmax(x, -1)",
            [(1, "torch.nn.functional"), (2, "torch.nn.functional.softmax")],
        ),
        ("import torch\n\ny = torch.nn.Linear(2, 3)", [(3, "torch.nn.Linear")]),
        ("import torch.nn as nn\ny = nn.Embedding(2, 3)", [(2, "torch.nn.Embedding")]),
        ("from torch import nn\n\nclass A(nn.RMSNorm): ...", [(3, "torch.nn.RMSNorm")]),
        ("from torch.nn import Linear as L\n", [(1, "torch.nn.Linear")]),
        ("import torch\nnn = torch.nn\ny = nn.SiLU()", [(3, "torch.nn.SiLU")]),
        ("import torch\ny = torch.softmax(x, 0)", [(2, "torch.softmax")]),
        ("y = (a + b).softmax(-1)", [(1, "Tensor.softmax")]),
        ("import torch\ny = torch.optim.AdamW(p)", [(2, "torch.optim.AdamW")]),
        ("from torch import nn\ny = getattr(nn, 'Linear')", [(2, "torch.nn.Linear")]),
        (
            "import importlib\nF = importlib.import_module('torch.nn.functional')\n",
            [(2, "torch.nn.functional")],
        ),
        (
            "import torch\ntorch.nn.utils.clip_grad_norm_(p, 1)",
            [(2, "torch.nn.utils.clip_grad_norm_")],
        ),
        ("from scratchlm.ops import OPS\n", [(1, "scratchlm.ops.OPS")]),
        ("import tiktoken\n", [(1, "tiktoken")]),
    ],
)
def test_what_the_course_forbids_is_refused(refused, text, found):
    assert refused(text) == found


def test_what_the_course_allows_is_not(refused):
    assert (
        refused("""
import torch
import torch.nn as nn
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter, Sequential
from torch.optim import Optimizer

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(2, 3))
        nn.init.trunc_normal_(self.w)
    def softmax(self, x): return torch.exp(x)
    def forward(self, x): return self.softmax(torch.sigmoid(x @ self.w.T))

class AdamW(torch.optim.Optimizer): ...

def softmax(x): return x
def embedding(x): return softmax(x)
""")
        == []
    )


def test_imported_files_of_the_project_are_read(tmp_path):
    (tmp_path / "basics").mkdir()
    (tmp_path / "basics" / "__init__.py").write_text("")
    (tmp_path / "basics" / "model.py").write_text("import torch\n\nlin = torch.nn.Linear\n")
    (tmp_path / "tests").mkdir()
    adapters = tmp_path / "tests" / "adapters.py"
    adapters.write_text("from basics.model import lin\n")
    (found,) = find_refused(adapters)
    assert (found.path.name, found.line, found.name) == ("model.py", 3, "torch.nn.Linear")
    assert str(found).endswith("model.py:3: torch.nn.Linear")
