"""The bundled workloads: models, their data, and how they are trained.

Importing this package does not import torch. The models are ordinary modules in files of their own: read
`hocket.workloads.edsr.model` and `hocket.workloads.resnet50.model`.
"""

from hocket.workloads._device import check_device
from hocket.workloads._example import Example, example
from hocket.workloads._progress import Follower
from hocket.workloads._report import report
from hocket.workloads._run import RunDirectory, conclude
from hocket.workloads._settings import SettingsError, ThroughputUnit, WorkloadSettings
from hocket.workloads._workload import BundledWorkload, build, names, settings_from_options

__all__ = [
    "BundledWorkload", "Example", "Follower", "RunDirectory", "SettingsError", "ThroughputUnit", "WorkloadSettings",
    "build", "check_device", "conclude", "example", "names", "report", "settings_from_options",
]  # fmt: skip
