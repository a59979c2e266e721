"""The zoo: architectures that hocket was not made for, each by every plan, held to the losses of a plain loop."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# torchvision's compiled part does not load beside a build of torch that it was not made for. timm and transformers
# need nothing of it here.
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))


def load() -> None:
    """Fill `entries.ENTRIES`; without timm's models where timm, which needs a torchvision, is not installed."""
    for name in ("by_hand", "hugging_face", "further", "diffusion", *(["vision"] if find_spec("timm") else [])):
        import_module(f"{__name__}.{name}")
