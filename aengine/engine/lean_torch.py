"""Importing torch faster, in a process that is aengine's own.

Owns: what is left out of torch's import, and how it is made up for.
Does not know: what torch is used for.
Invariants: torch computes the same. What is left out are Python functions that tell the shapes of results on the meta
device, for tracers and compilers (0.5 s of 1.9 s of processor time); who needs them later imports them then. A torch
laid out in another way is imported as usual.
"""

from __future__ import annotations

import sys
from types import ModuleType

_LEFT_OUT = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def import_torch() -> None:
    """`import torch` without the modules left out, unless it has been imported."""
    if "torch" in sys.modules:
        return
    placeholders = {name: ModuleType(name) for name in _LEFT_OUT if name not in sys.modules}
    sys.modules.update(placeholders)
    try:
        import torch
    finally:
        for name, placeholder in placeholders.items():
            if sys.modules.get(name) is placeholder:
                del sys.modules[name]
    import torch.distributed as distributed

    for parent in (torch, distributed):
        vars(parent).pop("_meta_registrations", None)


def import_left_out() -> None:
    """Make up for what `import_torch` left out: a device whose libraries may trace or compile."""
    import torch._meta_registrations  # noqa: F401
