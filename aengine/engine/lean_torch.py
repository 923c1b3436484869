"""Importing torch faster, in a process that is aengine's own.

Owns: what is left out of torch's import, and how it is made up for.
Does not know: what torch is used for.
Invariants: torch computes the same. What is left out are Python functions that tell the shapes of results on the meta
device, for tracers and compilers (0.5 s of 1.9 s of processor time), and parts for other purposes, which nothing else
in torch needs (0.1 s); they are imported before the next part of torch is, whoever asks for it (serving on the CPU asks
for none). A torch laid out in another way is imported as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LEFT_OUT = (
    "torch.distributions",
    "torch.ao.quantization",
    "torch.quantization",
    "torch.masked",
    "torch.export",
    "torch.distributed._meta_registrations",
    "torch._meta_registrations",
)  # in torch's order


def import_torch(*, lean: bool) -> None:
    """`import torch`; `lean`: without the modules left out, unless it has been imported."""
    if not lean or "torch" in sys.modules:
        import torch

        return
    placeholders = {name: ModuleType(name) for name in _LEFT_OUT if name not in sys.modules}
    sys.modules.update(placeholders)
    try:
        import torch  # noqa: F401
    finally:
        for name, placeholder in placeholders.items():
            if sys.modules.get(name) is placeholder:
                del sys.modules[name]
    for name, placeholder in placeholders.items():
        parent, _, own = name.rpartition(".")
        if vars(sys.modules[parent]).get(own) is placeholder:
            delattr(sys.modules[parent], own)
    sys.meta_path.insert(0, _MakeUp())


class _MakeUp(MetaPathFinder, Loader):
    """Sees the next part of torch that is imported. What was left out must come first: it needs other parts, and some
    of these need it, which only works in torch's own order."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch."):
            return None
        import_left_out()
        found = sys.modules.get(name)
        if found is None:
            return None
        # Imported meanwhile: the import that asked takes the spec it finds there, and must not run the part again.
        self._spec, found.__spec__ = found.__spec__, ModuleSpec(name, self)
        return found.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def import_left_out() -> None:
    """Make up for what `import_torch` left out: a device whose libraries may trace or compile."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _MakeUp)]
    for name in _LEFT_OUT:
        import_module(name)
