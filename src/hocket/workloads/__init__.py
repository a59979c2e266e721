"""The bundled workloads: models, their data, and how they are trained.

Importing this package does not import torch. The models are ordinary modules in files of their own: read
`hocket.workloads.edsr.model` and `hocket.workloads.resnet50.model`.
"""

from hocket.workloads._device import check_device as check_device
from hocket.workloads._example import Example as Example
from hocket.workloads._example import example as example
from hocket.workloads._progress import Follower as Follower
from hocket.workloads._report import report as report
from hocket.workloads._result import conclude as conclude
from hocket.workloads._run import RunDirectory as RunDirectory
from hocket.workloads._settings import SettingsError as SettingsError
from hocket.workloads._settings import WorkloadSettings as WorkloadSettings
from hocket.workloads._unit import ThroughputUnit as ThroughputUnit
from hocket.workloads._workload import BundledWorkload as BundledWorkload
from hocket.workloads._workload import build as build
from hocket.workloads._workload import names as names
from hocket.workloads._workload import settings_from_options as settings_from_options

__all__ = [
    "Example",
    "Follower",
    "RunDirectory",
    "WorkloadSettings",
    "SettingsError",
    "ThroughputUnit",
    "BundledWorkload",
    "build",
    "check_device",
    "conclude",
    "example",
    "names",
    "report",
    "settings_from_options",
]
