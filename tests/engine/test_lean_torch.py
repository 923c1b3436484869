"""A torch imported without what its compilers need computes, and can be completed."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from types import ModuleType
from aengine.engine import lean_torch

lean_torch.import_torch(lean=True)
import torch

left_out = (*lean_torch._LEFT_OUT, "torch._refs")
assert not any(name in sys.modules for name in left_out), [name for name in left_out if name in sys.modules]
assert not hasattr(torch, "_meta_registrations") and not hasattr(torch, "export")
empty = [
    f"{name}.{own}"
    for name, module in list(sys.modules.items())
    if name.startswith("torch")
    for own, value in list(vars(module).items())
    if isinstance(value, ModuleType) and value.__name__ in left_out
]
assert empty == [], empty  # nobody keeps what stood in their place
x = torch.arange(6.0).view(2, 3)
assert (x @ x.T).tolist() == [[5.0, 14.0], [14.0, 50.0]]
shape = torch.empty(2, 3, device="meta")
assert torch.cat([shape, shape]).view(3, 4)[1:].shape == (2, 4)
lean_torch.import_left_out()
assert torch._meta_registrations.__name__ == "torch._meta_registrations"
assert len(vars(torch._meta_registrations)) > 100
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert torch.masked.masked_tensor and torch.quantization.quantize_dynamic and torch.export.export
lean_torch.import_torch(lean=True)
print("done")
"""


LATER = (
    "from transformers.models.mllama.modeling_mllama import MllamaVisionModel",
    "import torch._refs, torch._dynamo",
    "import torch; assert not hasattr(torch, 'masked'); from torch.distributions import Normal; torch.masked.sum",
    "from torch.ao.quantization import QConfig; import torch; torch.quantization.QConfig",
    "import torch._decomp; assert len(torch._decomp.decomposition_table) > 500; import torch._dynamo",
)


@pytest.mark.parametrize("statement", LATER)
def test_any_other_part_of_torch_may_be_imported_later(statement):
    program = f"from aengine.engine.lean_torch import import_torch; import_torch(lean=True); {statement}; print('done')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def test_what_is_left_out_is_not_missed_and_can_be_had_later():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
