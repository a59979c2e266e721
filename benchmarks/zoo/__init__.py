"""The zoo: architectures that hocket was not made for, each by every plan, held to the losses of a plain loop."""

import sys
from types import ModuleType

# torchvision's compiled part does not load beside a build of torch that it was not made for. timm and transformers
# need nothing of it here.
sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
